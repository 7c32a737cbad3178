# Fails if the object of one instruction set defines any external symbol besides its table: a weak one
# (an inline function, a template) could replace everybody's copy with code that this machine lacks.
execute_process(COMMAND ${NM} --defined-only --extern-only --demangle ${OBJECT}
                OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(STRIP "${symbols}" symbols)
if(NOT symbols MATCHES "^[0-9a-f]+ [DR] tandem::kernels::${TABLE}$")
  message(FATAL_ERROR "${OBJECT} must define tandem::kernels::${TABLE} only, but defines:\n${symbols}")
endif()
