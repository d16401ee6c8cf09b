/*
 * Where a step's tokens stand, and which memory their ids lead to, on host and device alike. Everything that
 * turns an id into an address is here, bounds-checked: a bad id gives -1 or NULL.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOKENS_H
#define CSA_TOKENS_H

#include "tensor.h"

CSA_INLINE int64_t csa_query_len(const csa_tokens *tokens)
{
    return tokens->query_len > 0 ? tokens->query_len : 1;
}

/* Requests of a step, by whichever tensor tells. */
CSA_INLINE int64_t csa_token_requests(const csa_tokens *tokens)
{
    if (csa_present(&tokens->block_table))
        return tokens->block_table.shape[0];
    if (csa_present(&tokens->query_start))
        return tokens->query_start.shape[0] - 1;
    if (csa_present(&tokens->seq_lens))
        return tokens->seq_lens.shape[0];
    return csa_present(&tokens->ring_base) ? tokens->ring_base.shape[0] : 0;
}

/* First token of a request, and the end of the last one (request = requests). */
CSA_INLINE int64_t csa_token_first(const csa_tokens *tokens, int64_t request)
{
    if (csa_present(&tokens->query_start))
        return csa_i32(&tokens->query_start, request);
    int64_t limit = INT64_MAX / 2; /* requests are not bounded by memory where strides are 0 */
    return request < limit / csa_query_len(tokens) ? request * csa_query_len(tokens) : limit;
}

/* The last request that starts at or before the token. Junk in query_start gives some request, in bounds. */
CSA_INLINE int64_t csa_find_owner(const csa_tokens *tokens, int64_t token)
{
    int64_t low = 0, high = csa_token_requests(tokens);
    if (token >= csa_token_first(tokens, high))
        return -1;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (csa_token_first(tokens, middle) <= token)
            low = middle + 1;
        else
            high = middle;
    }
    return low - 1;
}

/* a / b of numbers that are not negative; most fit in 32 bits, where dividing is several times faster. */
CSA_INLINE int64_t csa_divide(int64_t a, int64_t b)
{
    return ((uint64_t)(a | b) >> 32) == 0 ? (int64_t)((uint32_t)a / (uint32_t)b) : a / b;
}

/* The request a token belongs to, -1 if there is none. */
CSA_INLINE int64_t csa_token_owner(const csa_tokens *tokens, int64_t token)
{
    int64_t owner;
    if (csa_present(&tokens->owners))
        owner = csa_i64(&tokens->owners, token);
    else if (csa_present(&tokens->query_start))
        owner = csa_find_owner(tokens, token);
    else
        owner = csa_divide(token, csa_query_len(tokens));
    return owner >= 0 && owner < csa_token_requests(tokens) ? owner : -1;
}

/* A token's position, -1 where it is negative or unknown. */
CSA_INLINE int64_t csa_token_position(const csa_tokens *tokens, int64_t token)
{
    int64_t position = -1;
    if (csa_present(&tokens->positions)) {
        position = csa_i64(&tokens->positions, token);
    } else {
        int64_t request = csa_token_owner(tokens, token);
        if (request >= 0)
            position = csa_i32(&tokens->seq_lens, request) - csa_token_first(tokens, request + 1) + token;
    }
    return position < 0 ? -1 : position;
}

/* Neither slot nor position is negative. */
CSA_INLINE bool csa_token_active(const csa_tokens *tokens, int64_t token)
{
    if (csa_present(&tokens->slots) && csa_i64(&tokens->slots, token) < 0)
        return false;
    return csa_token_position(tokens, token) >= 0;
}

/* Section 4's metadata of a row, as far as it is asked for; current is clipped where it is an int32. */
CSA_INLINE void csa_write_row(const csa_rows *rows, int64_t row, bool active, int64_t position)
{
    int64_t current = position / CSA_REGION;
    int32_t clipped = current < INT32_MAX ? (int32_t)current : INT32_MAX - 1;
    if (csa_present(&rows->active))
        *(uint8_t *)csa_at(&rows->active, row, 0, 0) = active;
    if (csa_present(&rows->positions))
        *(int64_t *)csa_at(&rows->positions, row, 0, 0) = position;
    if (csa_present(&rows->current))
        *(int64_t *)csa_at(&rows->current, row, 0, 0) = current;
    if (csa_present(&rows->lengths))
        *(int32_t *)csa_at(&rows->lengths, row, 0, 0) = clipped + 1;
    if (csa_present(&rows->topk_lengths))
        *(int32_t *)csa_at(&rows->topk_lengths, row, 0, 0) = clipped;
}

/* First ring row of a request, -1 if it has no ring. */
CSA_INLINE int64_t csa_token_ring(const csa_tokens *tokens, int64_t request)
{
    if (!csa_present(&tokens->ring_base) || request < 0)
        return -1;
    return csa_i64(&tokens->ring_base, request);
}

/* The table, if there is one, has a row for the position. */
CSA_INLINE bool csa_in_table(const csa_tensor *table, int64_t position)
{
    return !csa_present(table) || (position >= 0 && position < table->shape[0]);
}

/* The cache row that an active token's K and V go to; NULL if there is no cache, past it, or if the token is
 * inactive. */
CSA_INLINE void *csa_cache_row(const csa_tokens *tokens, const csa_cache *cache, int64_t token, int64_t group)
{
    if (!cache || !csa_present(&cache->kv) || !csa_token_active(tokens, token))
        return NULL;
    const csa_tensor *kv = &cache->kv;
    int64_t slot = csa_i64(&tokens->slots, token), block = slot / kv->shape[2];
    return block < kv->shape[0] ? csa_at(kv, block, group, slot % kv->shape[2]) : NULL;
}

/* The ring row of a position: index key, then z. NULL if there is none. */
CSA_INLINE void *csa_ring_row(const csa_cache *cache, int64_t base, int64_t position)
{
    if (!csa_present(&cache->ring) || base < 0 || position < 0 || cache->ring_capacity <= 0)
        return NULL;
    int64_t rows = cache->ring.shape[0], offset = position % cache->ring_capacity;
    if (base >= rows || offset >= rows - base)
        return NULL;
    return csa_at(&cache->ring, base + offset, 0, 0);
}

/* The block that holds a request's tokens [column * block_size, ...), -1 if it is not mapped to one of the
 * cache's blocks. */
CSA_INLINE int64_t csa_mapped_block(const csa_tensor *block_table, int64_t request, int64_t column,
                                    int64_t blocks)
{
    if (request < 0 || request >= block_table->shape[0] || column < 0 || column >= block_table->shape[1])
        return -1;
    int64_t block = *(const int32_t *)csa_at(block_table, request, column, 0);
    return block >= 0 && block < blocks ? block : -1;
}

/* How many tokens of a request's region stand at or before a position, and in *block where they are: from row
 * (region % (block_size / 8)) * 8 of that block on. 0 if the region is negative, past the position or not
 * mapped. */
CSA_INLINE int64_t csa_region_tokens(const csa_tokens *tokens, const csa_tensor *kv, int64_t request,
                                     int64_t region, int64_t position, int64_t *block)
{
    if (region < 0 || region > position / CSA_REGION)
        return 0;
    int64_t per_block = kv->shape[2] / CSA_REGION,
            last = position - region * CSA_REGION; /* the last one's offset */
    *block = csa_mapped_block(&tokens->block_table, request, region / per_block, kv->shape[0]);
    if (*block < 0)
        return 0;
    return last < CSA_REGION ? last + 1 : CSA_REGION;
}

/* The summary of a request's region; NULL if its block is not mapped. */
CSA_INLINE const uint8_t *csa_summary_at(const csa_tokens *tokens, const csa_cache *cache, int64_t request,
                                         int64_t region)
{
    int64_t per_block = cache->summaries.shape[1];
    int64_t block =
        csa_mapped_block(&tokens->block_table, request, region / per_block, cache->summaries.shape[0]);
    return block < 0 ? NULL : (const uint8_t *)csa_at(&cache->summaries, block, region % per_block, 0);
}

/* The summary that belongs to slot / 8; NULL if it lies past the cache. */
CSA_INLINE uint8_t *csa_summary_of_slot(const csa_cache *cache, int64_t slot_region)
{
    int64_t per_block = cache->summaries.shape[1];
    if (slot_region < 0 || slot_region / per_block >= cache->summaries.shape[0])
        return NULL;
    return (uint8_t *)csa_at(&cache->summaries, slot_region / per_block, slot_region % per_block, 0);
}

#endif
