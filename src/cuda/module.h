/*
 * The cuda back end lives in a shared object of its own, libcsa_cuda.so, which the core opens on demand: the
 * core depends on no CUDA library, and one package serves machines with and without a GPU. This is all that the
 * two know of each other, besides the seam (stages.h). SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_MODULE_H
#define CSA_CUDA_MODULE_H

#include "../context.h"

/* What the module needs of the core. Both must come from one build: they share the layout of csa_context. */
typedef struct csa_cuda_host {
    size_t version; /* CSA_CUDA_VERSION */
    csa_status (*fail)(csa_status status, const char *format, ...);
} csa_cuda_host;

#define CSA_CUDA_VERSION ((size_t)CSA_VERSION << 16 | sizeof(csa_context))

typedef struct csa_cuda_module {
    /* One line on the GPUs of this machine; CSA_ERROR_UNSUPPORTED if none can be used. */
    csa_status (*describe)(char *text, size_t capacity);
    /* One line on a GPU; CSA_ERROR_UNSUPPORTED if it cannot be used, CSA_ERROR_ARGUMENT if there is none of
     * that number. */
    csa_status (*describe_device)(int32_t device, char *text, size_t capacity);
    /* Fills in stages, tier and device of a context; loads every kernel. tier: "sm90", "portable", or NULL for
     * the best. */
    csa_status (*open)(csa_context *context, int32_t device, const char *tier);
    /* Clears a workspace and waits for the device. */
    csa_status (*warm_up)(const csa_context *context, void *workspace, size_t bytes);
    /* Waits for the stream's work, then copies device memory to the host. */
    csa_status (*fetch)(const csa_context *context, void *to, const void *from, size_t bytes, void *stream);
} csa_cuda_module;

#define CSA_CUDA_ENTRY "csa_cuda_enter" /* the one symbol of libcsa_cuda.so */
typedef const csa_cuda_module *csa_cuda_enter_fn(const csa_cuda_host *host);

/* The module, opened once per process; NULL if it cannot be had, and then *why says why. */
const csa_cuda_module *csa_open_cuda(const char **why);

#endif
