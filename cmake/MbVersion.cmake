# mb_version: the library behind proto/rpc/version.h. Included by CMakeLists.txt to define the target, and run again as
# a script (-P) at each build to refresh the generated file; it is rewritten only when the build id has changed.
if(CMAKE_SCRIPT_MODE_FILE)
  execute_process(COMMAND git describe --always --dirty WORKING_DIRECTORY ${MB_SOURCE}
    OUTPUT_VARIABLE MB_BUILD_ID OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(failed OR NOT MB_BUILD_ID)
    set(MB_BUILD_ID unknown)
  endif()
  configure_file(${MB_SOURCE}/proto/rpc/version.cc.in ${MB_OUT} @ONLY)
  return()
endif()

set(version_file ${CMAKE_BINARY_DIR}/generated/version.cc)
set(version_command ${CMAKE_COMMAND} -DMB_SOURCE=${CMAKE_SOURCE_DIR} -DMB_OUT=${version_file}
  -DMB_VERSION=${PROJECT_VERSION} -P ${CMAKE_SOURCE_DIR}/cmake/MbVersion.cmake)
add_custom_target(mb_version_refresh COMMAND ${version_command} BYPRODUCTS ${version_file} VERBATIM)
add_library(mb_version STATIC ${version_file})
target_include_directories(mb_version PUBLIC ${CMAKE_SOURCE_DIR})
add_dependencies(mb_version mb_version_refresh)
