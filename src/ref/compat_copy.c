/*
 * Section 9: copies of the cache, row after row (gather) or block after block (stage).
 * SPDX-License-Identifier: Apache-2.0
 */
#include "compat.h"

/* A key or a value as bf16. */
static void copy_half(const csa_cache *cache, const void *from, const float *scale, uint16_t *to)
{
    if (cache->kv.dtype == CSA_BF16) {
        memcpy(to, from, CSA_HEAD_SIZE * sizeof *to);
        return;
    }
    for (int i = 0; i < CSA_HEAD_SIZE; i++)
        to[i] = csa_float_to_bf16(csa_e4m3_to_float(((const uint8_t *)from)[i]) * (scale ? *scale : 1.0F));
}

static void copy_token(const csa_cache *cache, int64_t block, int64_t offset, uint16_t *key, uint16_t *value)
{
    const char *row = csa_at(&cache->kv, block, 0, offset);
    copy_half(cache, row, cache->k_scale, key);
    copy_half(cache, row + CSA_HEAD_SIZE * csa_itemsize(cache->kv.dtype), cache->v_scale, value);
}

/* ---- Gather ------------------------------------------------------------------------------------- */

/* Counts a row's tokens and, where asked to, copies them to key and value from token `to` on. */
static int64_t walk_row(const csa_compat_gather_args *a, int64_t row, int64_t to, bool copy)
{
    const csa_tensor *kv = &a->cache->kv;
    int64_t columns = a->selected.shape[1], request = csa_token_owner(a->tokens, row), count = 0, block;
    int64_t position = csa_token_active(a->tokens, row) ? csa_token_position(a->tokens, row) : -1;
    const int64_t *entries = csa_at(&a->selected, row, 0, 0);
    int64_t live = position < 0 ? 0 : position / CSA_REGION + 1;
    for (int64_t e = live < columns ? columns - live : 0; e < columns; e++) {
        int64_t tokens = csa_region_tokens(a->tokens, kv, request, entries[e], position, &block);
        for (int64_t i = 0; copy && i < tokens; i++)
            copy_token(a->cache, block, entries[e] * CSA_REGION % kv->shape[2] + i,
                       csa_at(&a->key, to + count + i, 0, 0), csa_at(&a->value, to + count + i, 0, 0));
        count += tokens;
    }
    return count;
}

static void gather_row(void *data, int64_t row)
{
    const csa_compat_gather_args *a = data;
    walk_row(a, row, csa_i32(&a->cu_k, row), true);
}

csa_status csa_ref_compat_gather(const csa_context *context, const csa_compat_gather_args *args)
{
    int64_t rows = args->selected.shape[0], end = 0;
    for (int64_t row = 0; row <= rows; row++) {
        *(int32_t *)csa_at(&args->cu_k, row, 0, 0) = (int32_t)end;
        if (row < rows)
            end += walk_row(args, row, 0, false);
    }
    return csa_parallel(context, rows, gather_row, (void *)args);
}

/* ---- Stage -------------------------------------------------------------------------------------- */

typedef struct staging {
    const csa_compat_stage_args *args;
    int64_t first_request, first_column; /* where the table's 0 means staged block 0 */
} staging;

static int64_t live_block(const csa_compat_stage_args *a, int64_t request, int64_t column)
{
    if (column * a->cache->kv.shape[2] >= csa_i32(&a->tokens->seq_lens, request))
        return -1;
    return csa_mapped_block(&a->tokens->block_table, request, column, a->cache->kv.shape[0]);
}

/* Numbers the live blocks, as far as there is room, and returns how many there are. */
static int64_t number_blocks(staging *s)
{
    const csa_compat_stage_args *a = s->args;
    int64_t count = 0, room = a->staged.shape[0];
    for (int64_t request = 0; request < a->staged_table.shape[0]; request++)
        for (int64_t column = 0; column < a->staged_table.shape[1]; column++) {
            int64_t block = live_block(a, request, column), number = block < 0 ? room : count++;
            *(int32_t *)csa_at(&a->staged_table, request, column, 0) = number < room ? (int32_t)number : 0;
            if (number == 0 && room > 0) {
                s->first_request = request;
                s->first_column = column;
            }
            if (number < room && csa_present(&a->staged_pages))
                *(int32_t *)csa_at(&a->staged_pages, number, 0, 0) = (int32_t)block;
        }
    return count;
}

static void stage_request(void *data, int64_t request)
{
    const staging *s = data;
    const csa_compat_stage_args *a = s->args;
    for (int64_t column = 0; column < a->staged_table.shape[1]; column++) {
        int64_t number = *(const int32_t *)csa_at(&a->staged_table, request, column, 0);
        int64_t block = live_block(a, request, column);
        bool first = request == s->first_request && column == s->first_column;
        if (block < 0 || (number == 0 && !first))
            continue;
        for (int64_t token = 0; token < a->staged.shape[2]; token++) {
            uint16_t *row = csa_at(&a->staged, number, 0, token);
            copy_token(a->cache, block, token, row, row + CSA_HEAD_SIZE);
        }
    }
}

csa_status csa_ref_compat_stage(const csa_context *context, const csa_compat_stage_args *args)
{
    staging s = {args, -1, -1};
    int64_t count = number_blocks(&s);
    if (csa_present(&args->staged_count))
        *(int32_t *)csa_at(&args->staged_count, 0, 0, 0) = (int32_t)count;
    return csa_parallel(context, args->staged_table.shape[0], stage_request, &s);
}
