/*
 * Byte layouts that several files, .c and .cu, agree on. Sizes of the model are in csa.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_FORMAT_H
#define CSA_FORMAT_H

#include <csa/csa_compat.h>

#include <assert.h>

/* A row of prefill metadata (section 3): slot / 8 of the run's first active token, its position % 8, then for
 * each offset in the region the number of the active token there, or -1. */
enum {
    CSA_RUN_SLOT = 0,
    CSA_RUN_OFFSET = 1,
    CSA_RUN_TOKENS = 2,
    CSA_RUN_COLUMNS = CSA_RUN_TOKENS + CSA_REGION
};

/* Where the scales of a packed page start (section 9); csa_compat.h has the other sizes. */
enum { CSA_PAGE_SCALES = CSA_COMPAT_PAGE_REGIONS * CSA_SUMMARY_SIZE };

static_assert(CSA_KV_SIZE == 2 * CSA_HEAD_SIZE, "a cache row is a key and a value");
static_assert(CSA_RING_SIZE == 2 * CSA_SUMMARY_SIZE, "a ring row is an index key and a z");
static_assert(CSA_COMPAT_PAGE_BYTES == CSA_PAGE_SCALES + CSA_COMPAT_PAGE_REGIONS * 4,
              "256 bytes and a scale each");
static_assert(sizeof(csa_dtype) == 4, "DLPack's DLDataType is 4 bytes");

#endif
