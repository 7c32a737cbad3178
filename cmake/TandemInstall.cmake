# cmake --install: headers, the rooms' archives, and a package file, so that another project writes
# find_package(tandem) and links tandem::tandem. The folder may be moved: nothing in it names a place on
# the machine that built it. (tests/install holds it to that.)
#
# Users link tandem::tandem only. The archives behind it are exported as tandem::internal_<room>, because
# a static library's users must link what it links.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(archives tandem_sequencer)
foreach(room IN LISTS TANDEM_ROOMS)
  list(APPEND archives tandem_${room})
endforeach()
foreach(archive IN LISTS archives)
  string(REPLACE tandem_ internal_ name ${archive})
  set_target_properties(${archive} PROPERTIES EXPORT_NAME ${name})
endforeach()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tandem)
install(TARGETS tandem ${archives} EXPORT tandemTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT tandemTargets NAMESPACE tandem:: DESTINATION ${package_dir})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/tandem DESTINATION include FILES_MATCHING PATTERN "*.h")
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/tandem)

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/tandemConfig.cmake.in
  ${PROJECT_BINARY_DIR}/tandemConfig.cmake INSTALL_DESTINATION ${package_dir}
  NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/tandemConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/tandemConfig.cmake
  ${PROJECT_BINARY_DIR}/tandemConfigVersion.cmake
  ${CMAKE_CURRENT_LIST_DIR}/FindLibTorch.cmake
  ${CMAKE_CURRENT_LIST_DIR}/FindNCCL.cmake
  DESTINATION ${package_dir})
