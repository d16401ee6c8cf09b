/*
 * Memory that the mirror (mirror.c) copies a call's tensors to: a GPU's, or memory of the host behind guards,
 * which stands in for it where there is none. SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TEST_DEVICE_H
#define CSA_TEST_DEVICE_H

#include <stddef.h>
#include <stdint.h>

/* Nothing here fails: what does not work ends the process, and says why. */
typedef struct device {
    /* Exactly so many bytes, at an address that is `residue` modulo DEVICE_ALIGNMENT. */
    uint8_t *(*allocate)(size_t bytes, size_t residue);
    void (*release)(uint8_t *memory, size_t bytes);
    void (*copy_in)(uint8_t *to, const uint8_t *from, size_t bytes);
    void (*copy_out)(uint8_t *to, const uint8_t *from, size_t bytes);
    void (*synchronise)(void);
} device;

enum { DEVICE_ALIGNMENT = 256 };

/* CUDA's runtime, opened at the first call. */
const device *device_cuda(void);

/* Pages of the host with inaccessible ones around them; bytes that share pages with the memory, but do not
 * belong to it, must not change until it is released. */
const device *device_guarded(void);

__attribute__((noreturn, format(printf, 1, 2))) void device_fail(const char *format, ...);

#endif
