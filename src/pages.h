/*
 * The 8-token pages into which section 9 cuts a group of the KV cache.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_PAGES_H
#define CSA_PAGES_H

#include "tensor.h"

/* Pages from the start of one block to the start of the next; those past block_size / 8 are not the group's.
 * The block stride must be a multiple of eight token rows. A cache of one block has no stride. */
CSA_INLINE int64_t csa_block_pages(const csa_tensor *kv)
{
    return kv->shape[0] > 1 ? kv->stride[0] / (CSA_REGION * kv->stride[2]) : kv->shape[2] / CSA_REGION;
}

/* The first token row of a page; NULL if it is not one of the group's. */
CSA_INLINE void *csa_page_row(const csa_tensor *kv, int64_t page)
{
    int64_t per_block = csa_block_pages(kv), block = page / per_block, region = page % per_block;
    if (page < 0 || block >= kv->shape[0] || region >= kv->shape[2] / CSA_REGION)
        return NULL;
    return csa_at(kv, block, 0, region * CSA_REGION);
}

#endif
