/*
 * Opening the part of `csa bench` that needs CUDA.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "bench_device.h"

#include <dlfcn.h>
#include <string.h>

#define FILE_NAME "libcsa_bench_cuda.so"

/* Where the command finds libcsa.so: by its run path, else where the dynamic linker looks. */
static const bench_device *load(void)
{
    void *library = dlopen(FILE_NAME, RTLD_NOW | RTLD_LOCAL);
    void *symbol = library ? dlsym(library, BENCH_DEVICE_ENTRY) : NULL;
    bench_device_fn *enter;
    memcpy(&enter, &symbol, sizeof enter);
    return symbol ? enter() : NULL;
}

const bench_device *bench_device_open(char *name, size_t capacity, size_t *cache, int *code)
{
    const bench_device *device = load();
    const char *why = device ? FILE_NAME " is of another build" : dlerror();
    if (!device || device->size != sizeof *device) {
        *code = tool_fail(TOOL_UNSUPPORTED, "bench", "the cuda back end is measured by " FILE_NAME ": %s",
                          why ? why : "it cannot be opened");
        return NULL;
    }
    device->open(name, capacity, cache);
    *code = bench_device_check(device);
    return *code == TOOL_OK ? device : NULL;
}

int bench_device_check(const bench_device *device)
{
    const char *error = device->error();
    return error ? tool_fail(TOOL_INTERNAL, "bench", "cuda: %s", error) : TOOL_OK;
}
