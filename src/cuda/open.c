/*
 * Finding libcsa_cuda.so: beside the library itself, else where the dynamic linker looks.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "module.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define FILE_NAME "libcsa_cuda.so"

static const csa_cuda_module *module;
static char reason[200];

static void *open_beside_us(void)
{
    Dl_info us;
    char path[4096];
    int (*ours)(void) = csa_version;
    void *address;
    memcpy(&address, &ours, sizeof address);
    if (!dladdr(address, &us) || !us.dli_fname)
        return NULL;
    const char *end = strrchr(us.dli_fname, '/');
    int folder = end ? (int)(end - us.dli_fname) + 1 : 0;
    if (snprintf(path, sizeof path, "%.*s" FILE_NAME, folder, us.dli_fname) >= (int)sizeof path || folder == 0)
        return NULL;
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

static void open_module(void)
{
    static const csa_cuda_host host = {CSA_CUDA_VERSION, csa_fail};
    void *library = open_beside_us();
    if (!library)
        library = dlopen(FILE_NAME, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(reason, sizeof reason, "%s (not built or not installed: docs/KERNELS.md)", dlerror());
        return;
    }
    void *symbol = dlsym(library, CSA_CUDA_ENTRY);
    csa_cuda_enter_fn *enter;
    memcpy(&enter, &symbol, sizeof enter);
    module = symbol ? enter(&host) : NULL;
    if (!module)
        snprintf(reason, sizeof reason, FILE_NAME " is of another build than this library");
}

const csa_cuda_module *csa_open_cuda(const char **why)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_module);
    *why = reason;
    return module;
}
