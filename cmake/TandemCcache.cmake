# Compiles through ccache where it is installed, also the files that use the precompiled header:
# ccache accepts those only if told that the macros a header was precompiled with are known to match.
if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(TANDEM_CCACHE ccache)
  mark_as_advanced(TANDEM_CCACHE)
  if(TANDEM_CCACHE)
    set(CMAKE_CXX_COMPILER_LAUNCHER
        ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
        ${TANDEM_CCACHE})
  endif()
endif()
