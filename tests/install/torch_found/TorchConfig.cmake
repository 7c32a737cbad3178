# What LibTorch's package file leaves behind, as far as FindLibTorch.cmake looks at it.
get_filename_component(TORCH_INSTALL_PREFIX ${STANDIN_TORCH} REALPATH)
