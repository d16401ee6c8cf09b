# Toolchain file: 64-bit Arm, with Debian's cross compiler, run by qemu-user. scripts/cross puts in place what
# this counts on.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)

# The compiler brings its C library and libgomp; jansson and cmocka lie in a folder of their own.
set(csa_aarch64_root "${CMAKE_CURRENT_LIST_DIR}/../build/aarch64-root")
file(REAL_PATH "${csa_aarch64_root}" csa_aarch64_root)
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu "${csa_aarch64_root}")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(ENV{PKG_CONFIG_SYSROOT_DIR} "${csa_aarch64_root}")
set(ENV{PKG_CONFIG_LIBDIR} "${csa_aarch64_root}/usr/lib/aarch64-linux-gnu/pkgconfig")

# A processor without extensions: nothing newer is needed, and emulating it is faster than all that QEMU knows.
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -cpu cortex-a72 -L /usr/aarch64-linux-gnu)
