// tandem/tandem.h: everything a program that trains with Tandem includes.
#pragma once

#include <tandem/accumulation.h>
#include <tandem/engine.h>
#include <tandem/engine_optimizer.h>
#include <tandem/error.h>
#include <tandem/optimizer.h>
#include <tandem/options.h>
#include <tandem/outputs.h>
#include <tandem/report.h>
#include <tandem/schedule.h>
#include <tandem/world.h>
