// tandem/accumulation.h: several micro-batches an update, and what moves when.
//
//   tandem::GradientAccumulation accumulation(world, {.steps = 4});
//   for (auto& batch : accumulation.epoch(loader)) {
//     loss_of(batch).backward();                  // the mean over the micro-batch
//     if (accumulation.boundary()) world.step();  // the fourth, or the epoch's last
//     scheduler.step();                           // an AccumulationScheduler
//   }
//
// A1 A window ends with its steps-th micro-batch, or with the epoch's last: a short one is stepped
//    once, and divided by what it held.
// A2 An epoch begins a new window.
// A3 Only begin(), epoch() and restart() move it: evaluation and forwards without gradients in the
//    middle of a window change nothing.
// A4 Nothing here communicates.
#pragma once

#include <tandem/world.h>

#include <concepts>
#include <cstdint>
#include <iterator>
#include <optional>
#include <type_traits>
#include <utility>

namespace tandem {

template <class Range>
class MicroBatches;

struct AccumulationOptions {
  // --- changes results ---
  /// Micro-batches of this rank in a window, >= 1.
  std::int64_t steps = 1;
  /// Every micro-batch but a window's last runs under World::hold(): what stage-1 engines gather is
  /// summed locally and travels once. Sums are then taken in another order: not the same bits on
  /// other numbers of ranks.
  bool hold = false;
  /// An AccumulationScheduler moves by the micro-batches that the window held, as if each had been
  /// an update; false: one inner step for a window, for schedulers whose length was chosen in
  /// updates.
  bool adjust_scheduler = true;
  /// The ranks' micro-batches are pieces of one batch that the scheduler's author counted as one:
  /// the number of ranks is left out.
  bool split_batches = false;
};

/// What the caller knows of the micro-batch that begins.
struct MicroBatch {
  bool last_of_epoch = false;
};

/// Counts the micro-batches of a world's windows on this rank. Sets World::set_average() to
/// kMicroBatches, unless the world averages by tokens or not at all (then what those say goes).
///
/// A micro-batch is what lies between two begin() (or two turns of the loop over epoch()), for the
/// divisor it is one backward call. With several backward calls in a micro-batch, kMicroBatches
/// divides by all of them: two losses with a backward each give half of what one backward of their
/// sum gives. Make it one, `(a + b).backward()`, or average by tokens, or by nothing with losses
/// that are scaled already.
///
/// Ranks: deal each of them the same number of micro-batches. Where they differ in the last window
/// of an epoch only, and each has at least one in it, the step still divides by what all of them
/// held, but an AccumulationScheduler with adjust_scheduler moves differently on them, which the
/// next step refuses: use adjust_scheduler = false, or a LearningRateSchedule in samples. Where
/// they differ in the number of windows, the rank with fewer calls world.step() for those that it
/// misses, or world.leave() at the end.
///
/// After a failed pass: where World::window() is 0, restart() and the window's micro-batches again;
/// else (backward threw before it reached an engine) this micro-batch again, without begin(). After
/// a World::zero_grad() in the middle of a window: restart().
///
/// Thread safety: as World, which outlives it and stays where it is.
class GradientAccumulation {
 public:
  /// Throws InvalidArgument: steps < 1, a window of the world that holds gradients already.
  GradientAccumulation(World& world, const AccumulationOptions& options);
  GradientAccumulation(const GradientAccumulation&) = delete;
  GradientAccumulation& operator=(const GradientAccumulation&) = delete;
  GradientAccumulation(GradientAccumulation&&) = delete;
  GradientAccumulation& operator=(GradientAccumulation&&) = delete;
  ~GradientAccumulation() = default;

  /// A new epoch over `range`, to be iterated once; its last micro-batch is a boundary, for which
  /// one element is fetched ahead. Any range: containers are not copied, of single-pass ones (a
  /// LibTorch DataLoader, `*loader`) each element is copied or, if that cannot be, moved. An lvalue
  /// outlives the loop. What a loop that was left early gathered stays in the world's window: step
  /// or World::zero_grad() before the next.
  template <class Range>
  [[nodiscard]] MicroBatches<Range> epoch(Range&& range);

  /// By hand: begins a micro-batch, before its forward.
  void begin(const MicroBatch& micro_batch = {});
  /// The next micro-batch is the first of a window, whatever was counted.
  void restart();

  /// The micro-batch that was begun last is its window's last: step after its backward.
  [[nodiscard]] bool boundary() const { return boundary_; }
  /// Micro-batches of the window so far, the one begun last included: on this rank, and on all
  /// ranks if each holds as many (with split_batches the ranks count as one).
  [[nodiscard]] std::int64_t micro_batches() const { return held_; }
  [[nodiscard]] std::int64_t joint_micro_batches() const { return held_ * ranks(); }

  /// Inner steps that an AccumulationScheduler owes to the windows that ended at a boundary and
  /// were applied, since this object was made.
  [[nodiscard]] std::int64_t scheduler_steps();

  [[nodiscard]] const AccumulationOptions& options() const { return options_; }

 private:
  template <class Range>
  friend class MicroBatches;

  [[nodiscard]] std::int64_t ranks() const { return options_.split_batches ? 1 : world_.size(); }
  void settle();
  void release() { hold_.reset(); }

  World& world_;
  const AccumulationOptions options_;
  std::optional<Scope> hold_;
  std::int64_t held_ = 0;
  bool boundary_ = false;
  bool settled_ = true;       // the window that ended is in scheduler_steps_, if it was applied
  std::int64_t updates_ = 0;  // of the world, when the last micro-batch began
  std::int64_t scheduler_steps_ = 0;
};

/// The loop of GradientAccumulation::epoch().
template <class Range>
class [[nodiscard]] MicroBatches {
  using Source = decltype(std::begin(std::declval<std::remove_reference_t<Range>&>()));
  using End = decltype(std::end(std::declval<std::remove_reference_t<Range>&>()));
  using Element = decltype(*std::declval<Source&>());
  using Value = std::remove_cvref_t<Element>;
  static constexpr bool kMultiPass = std::forward_iterator<Source>;

 public:
  MicroBatches(GradientAccumulation& accumulation, Range&& range)
      : accumulation_(accumulation), range_(std::forward<Range>(range)) {}
  ~MicroBatches() { accumulation_.release(); }
  MicroBatches(const MicroBatches&) = delete;
  MicroBatches& operator=(const MicroBatches&) = delete;
  MicroBatches(MicroBatches&&) = delete;
  MicroBatches& operator=(MicroBatches&&) = delete;

  class Iterator {
   public:
    explicit Iterator(MicroBatches& loop) : loop_(&loop) {}
    decltype(auto) operator*() const { return loop_->element(); }
    Iterator& operator++() {
      loop_->advance();
      return *this;
    }
    bool operator!=(std::default_sentinel_t /*end*/) const { return !loop_->done_; }

   private:
    MicroBatches* loop_;
  };

  Iterator begin() {
    accumulation_.restart();
    next_.emplace(std::begin(range_));
    end_.emplace(std::end(range_));
    advance();
    return Iterator(*this);
  }
  [[nodiscard]] std::default_sentinel_t end() const { return {}; }

 private:
  decltype(auto) element() {
    if constexpr (kMultiPass) {
      return **current_;
    } else {
      return static_cast<Value&>(*current_);
    }
  }

  void advance() {
    if (!(*next_ != *end_)) {
      done_ = true;
      accumulation_.release();
      return;
    }
    if constexpr (kMultiPass) {
      current_.emplace(*next_);
    } else if constexpr (std::copy_constructible<Value>) {
      current_.emplace(**next_);
    } else {
      current_.emplace(std::move(**next_));
    }
    ++*next_;
    accumulation_.begin({.last_of_epoch = !(*next_ != *end_)});
  }

  GradientAccumulation& accumulation_;
  Range range_;  // a reference where an lvalue was given
  std::optional<Source> next_;
  std::optional<End> end_;
  std::optional<std::conditional_t<kMultiPass, Source, Value>> current_;
  bool done_ = false;
};

template <class Range>
MicroBatches<Range> GradientAccumulation::epoch(Range&& range) {
  return MicroBatches<Range>(*this, std::forward<Range>(range));
}

/// A scheduler that was written for one process without accumulation, under accumulation on several
/// ranks: called once a micro-batch, after the step if there was one, it moves only for windows
/// that were applied, and then so far that the scheduler ends where its author meant:
///
/// |                          | inner steps for an applied window                    |
/// |--------------------------|------------------------------------------------------|
/// | adjust_scheduler         | micro-batches that the window held on a rank x ranks |
/// |   and split_batches      | micro-batches that the window held on a rank         |
/// | not adjust_scheduler     | ranks                                                |
/// |   and split_batches      | 1                                                    |
///
/// `Scheduler`: anything with step(), as torch::optim::StepLR and what derives from
/// torch::optim::LRScheduler, over Engine::optimizer(). Its step() is not virtual there, so that
/// this is a wrapper and no LRScheduler. One with step(metric), as
/// torch::optim::ReduceLROnPlateauScheduler, takes one inner step for each call that finds new
/// applied windows: the same metric said several times would pass for no progress; the metric is
/// the same on all ranks (World::mean).
///
/// Scheduler and accumulation outlive it. Not collective; called alike on every rank.
template <class Scheduler>
class AccumulationScheduler {
 public:
  AccumulationScheduler(Scheduler& scheduler, GradientAccumulation& accumulation)
      : scheduler_(scheduler),
        accumulation_(accumulation),
        taken_(accumulation.scheduler_steps()) {}

  void step() requires requires(Scheduler& scheduler) { scheduler.step(); }
  {
    for (std::int64_t owed = take(); owed > 0; --owed) {
      scheduler_.step();
    }
  }

  template <class Metric>
  void step(Metric metric) requires requires(Scheduler& scheduler, Metric m) {
    scheduler.step(m);
  }
  {
    if (take() > 0) {
      scheduler_.step(metric);
    }
  }

 private:
  std::int64_t take() {
    const std::int64_t all = accumulation_.scheduler_steps();
    return all - std::exchange(taken_, all);
  }

  Scheduler& scheduler_;
  GradientAccumulation& accumulation_;
  std::int64_t taken_;
};

}  // namespace tandem
