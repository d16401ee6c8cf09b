/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"
#include "tokens.h"

static void refuse_id(csa_checker *c, const char *name, int64_t index, int64_t value, int64_t low, int64_t high)
{
    csa_refuse(c, CSA_ERROR_ID, "%s[%lld] is %lld, expected %lld to %lld", name, (long long)index,
               (long long)value, (long long)low, (long long)high);
}

static void expect(csa_checker *c, const char *name, int64_t index, int64_t value, int64_t low, int64_t high)
{
    if (value < low || value > high)
        refuse_id(c, name, index, value, low, high);
}

/* Tokens per block of kv [blocks, G, block_size, 384] or summaries [blocks, block_size / 8, 256]. */
static int64_t block_size(const csa_tensor *cache)
{
    return cache->ndim == 4 ? cache->shape[2] : cache->shape[1] * CSA_REGION;
}

static void check_query_start(csa_checker *c, const csa_tokens *k, int64_t count)
{
    if (!csa_present(&k->query_start))
        return;
    for (int64_t i = 0, least = 0; i < k->query_start.shape[0] && c->status == CSA_OK; i++) {
        expect(c, "tokens.query_start", i, csa_i32(&k->query_start, i), least, count);
        least = csa_i32(&k->query_start, i);
    }
}

/* As the caller gave it; -1 where query_start gives none. */
static int64_t given_owner(const csa_tokens *k, int64_t token)
{
    return csa_present(&k->owners) ? csa_i64(&k->owners, token) : csa_token_owner(k, token);
}

/* A slot must lie in the cache, have its position's offset and, where a table is given, lie in the table's
 * block. */
static void check_slot(csa_checker *c, const csa_tokens *k, const csa_tensor *cache, int64_t token)
{
    int64_t slot = csa_i64(&k->slots, token), position = csa_token_position(k, token), size = block_size(cache);
    expect(c, "tokens.slots", token, slot, 0, cache->shape[0] * size - 1);
    if (slot % size != position % size)
        csa_refuse(c, CSA_ERROR_ID,
                   "tokens.slots[%lld] is %lld, offset %lld of its block, but position %lld has %lld",
                   (long long)token, (long long)slot, (long long)(slot % size), (long long)position,
                   (long long)(position % size));
    if (c->status != CSA_OK || !csa_present(&k->block_table))
        return;
    int64_t block =
        csa_mapped_block(&k->block_table, csa_token_owner(k, token), position / size, cache->shape[0]);
    if (block >= 0 && block != slot / size)
        csa_refuse(
            c, CSA_ERROR_ID,
            "tokens.slots[%lld] is %lld, in block %lld, but the block table has block %lld for position %lld",
            (long long)token, (long long)slot, (long long)(slot / size), (long long)block, (long long)position);
}

/* Where a token stands can be said twice; then both must say the same. */
static void check_said_twice(csa_checker *c, const csa_tokens *k, int64_t token, int64_t owner)
{
    if (!csa_present(&k->positions) || !csa_present(&k->seq_lens))
        return;
    int64_t position = csa_token_position(k, token);
    int64_t other = csa_i32(&k->seq_lens, owner) - csa_token_first(k, owner + 1) + token;
    if (position != other)
        csa_refuse(c, CSA_ERROR_ID, "tokens.positions[%lld] is %lld, but tokens.seq_lens[%lld] puts it at %lld",
                   (long long)token, (long long)position, (long long)owner, (long long)other);
}

/* An active token's owner, position and, if it is to be cached, its slot. */
static void check_token(csa_checker *c, const csa_tokens *k, const csa_tensor *cache, bool written,
                        int64_t token)
{
    int64_t owner = given_owner(k, token);
    expect(c, "owner of token", token, owner, 0, csa_token_requests(k) - 1);
    if (c->status == CSA_OK)
        check_said_twice(c, k, token, owner);
    if (c->status == CSA_OK && written && cache)
        check_slot(c, k, cache, token);
}

static void check_seq_lens(csa_checker *c, const csa_tokens *k)
{
    if (!csa_present(&k->seq_lens))
        return;
    for (int64_t i = 0; i < k->seq_lens.shape[0] && c->status == CSA_OK; i++)
        expect(c, "tokens.seq_lens", i, csa_i32(&k->seq_lens, i), 0, INT32_MAX);
}

static void check_tokens(csa_checker *c, const csa_tokens *k, const csa_tensor *cache, bool written,
                         int64_t count)
{
    check_query_start(c, k, count);
    check_seq_lens(c, k);
    for (int64_t token = 0; token < count && c->status == CSA_OK; token++)
        if (csa_token_active(k, token))
            check_token(c, k, cache, written, token);
}

void csa_check_prepare_ids(csa_checker *c, const csa_prepare_args *a)
{
    int64_t count = a->index_query.shape[0], last = a->index_rope.shape[0] - 1;
    if (csa_present(&a->rope) && a->rope.shape[0] - 1 < last)
        last = a->rope.shape[0] - 1;
    for (int64_t token = 0; token < count && c->status == CSA_OK; token++) {
        if (!csa_token_active(a->tokens, token))
            continue;
        expect(c, "position of token", token, csa_token_position(a->tokens, token), 0, last);
        if (a->cache && csa_present(&a->cache->kv) && csa_present(&a->query))
            expect(c, "tokens.slots", token, csa_i64(&a->tokens->slots, token), 0,
                   a->cache->kv.shape[0] * a->cache->kv.shape[2] - 1);
    }
}

/* A request without active tokens is padding: its ring may be anything. */
static void check_rings(csa_checker *c, const csa_tokens *k, const csa_cache *cache, int64_t count)
{
    if (count > 0 && csa_present(&cache->ring) && !csa_present(&k->ring_base))
        csa_refuse(c, CSA_ERROR_ID,
                   "cache.ring is given, but tokens.ring_base is absent: no request would have a ring");
    for (int64_t token = 0; token < count && c->status == CSA_OK; token++) {
        int64_t request = csa_token_active(k, token) ? csa_token_owner(k, token) : -1,
                base = csa_token_ring(k, request);
        if (base >= 0 && cache->ring_capacity > cache->ring.shape[0])
            csa_refuse(c, CSA_ERROR_ID, "cache.ring_capacity is %lld, but cache.ring has %lld rows",
                       (long long)cache->ring_capacity, (long long)cache->ring.shape[0]);
        if (base >= 0)
            expect(c, "tokens.ring_base", request, base, 0, cache->ring.shape[0] - cache->ring_capacity);
    }
}

static void check_verify_lengths(csa_checker *c, const csa_tokens *k)
{
    for (int64_t i = 0; i < csa_token_requests(k) && c->status == CSA_OK; i++)
        expect(c, "tokens of request", i, csa_token_first(k, i + 1) - csa_token_first(k, i), 0, k->query_len);
}

/* Active neighbours of one request stand side by side. */
static void check_ascending(csa_checker *c, const csa_tokens *k, int64_t count)
{
    for (int64_t token = 1; token < count && c->status == CSA_OK; token++) {
        bool together = csa_token_active(k, token - 1) && csa_token_active(k, token) &&
                        csa_token_owner(k, token - 1) == csa_token_owner(k, token);
        int64_t before = csa_token_position(k, token - 1);
        if (together && csa_token_position(k, token) - 1 != before)
            csa_refuse(c, CSA_ERROR_ID, "token %lld stands at %lld, but its neighbour before it at %lld",
                       (long long)token, (long long)csa_token_position(k, token), (long long)before);
    }
}

void csa_check_summarize_ids(csa_checker *c, csa_op op, const csa_summarize_args *a)
{
    bool metadata = op == CSA_OP_SUMMARIZE_METADATA;
    int64_t count = metadata ? a->metadata.shape[0] : a->key.shape[0];
    check_tokens(c, a->tokens, metadata ? NULL : &a->cache->summaries, true, count);
    if (!metadata)
        check_rings(c, a->tokens, a->cache, count);
    if (op == CSA_OP_SUMMARIZE_VERIFY)
        check_verify_lengths(c, a->tokens);
    if (op == CSA_OP_SUMMARIZE_PREFILL || metadata)
        check_ascending(c, a->tokens, count);
}

/* Table entries of an owner's blocks 0 to the one of `position`. */
static void check_blocks(csa_checker *c, const csa_tokens *k, const csa_tensor *cache, int64_t owner,
                         int64_t position)
{
    int64_t last = position / block_size(cache);
    if (last >= k->block_table.shape[1]) {
        csa_refuse(c, CSA_ERROR_ID,
                   "position %lld of request %lld needs %lld columns, but tokens.block_table has %lld",
                   (long long)position, (long long)owner, (long long)last + 1,
                   (long long)k->block_table.shape[1]);
        return;
    }
    for (int64_t column = 0; column <= last && c->status == CSA_OK; column++) {
        int64_t block = *(const int32_t *)csa_at(&k->block_table, owner, column, 0);
        if (block < 0 || block >= cache->shape[0])
            csa_refuse(c, CSA_ERROR_ID, "tokens.block_table[%lld, %lld] is %lld, expected 0 to %lld",
                       (long long)owner, (long long)column, (long long)block, (long long)cache->shape[0] - 1);
    }
}

void csa_check_region(csa_checker *c, const csa_tokens *tokens, int64_t token, int64_t regions)
{
    int64_t position = csa_token_position(tokens, token), owner = csa_token_owner(tokens, token);
    bool by_token = csa_present(&tokens->positions); /* else it has an owner, or it were not active */
    if (position / CSA_REGION >= regions)
        csa_refuse(c, CSA_ERROR_ID,
                   "tokens.%s[%lld] is %lld: token %lld stands in region %lld, expected 0 to %lld",
                   by_token ? "positions" : "seq_lens", (long long)(by_token ? token : owner),
                   (long long)(by_token ? position : csa_i32(&tokens->seq_lens, owner)), (long long)token,
                   (long long)(position / CSA_REGION), (long long)regions - 1);
}

void csa_check_seen_ids(csa_checker *c, const csa_tokens *tokens, const csa_tensor *cache, int64_t count,
                        int64_t regions)
{
    check_tokens(c, tokens, cache, false, count);
    for (int64_t token = 0; token < count && c->status == CSA_OK; token++) {
        if (!csa_token_active(tokens, token))
            continue;
        csa_check_region(c, tokens, token, regions);
        if (c->status == CSA_OK)
            check_blocks(c, tokens, cache, csa_token_owner(tokens, token), csa_token_position(tokens, token));
    }
}

void csa_check_select_ids(csa_checker *c, const csa_select_args *a)
{
    for (int64_t row = 0; row < a->current.shape[0] && c->status == CSA_OK; row++)
        expect(c, "current", row, csa_i64(&a->current, row), -1, a->scores.shape[1] - 1);
}

/* The entries of an active row's list that will be used. */
static void check_list(csa_checker *c, const csa_attend_args *a, int64_t row, int64_t position)
{
    int64_t columns = a->selected.shape[1], last = position / CSA_REGION;
    const int64_t *list = csa_at(&a->selected, row, 0, 0);
    int64_t used = last < columns ? last + 1 : columns;
    for (int64_t i = columns - used; i < columns && c->status == CSA_OK; i++)
        if (list[i] < 0 || list[i] > last)
            csa_refuse(c, CSA_ERROR_ID,
                       "selected[%lld, %lld] is %lld, expected 0 to %lld in the last %lld entries",
                       (long long)row, (long long)i, (long long)list[i], (long long)last, (long long)used);
}

void csa_check_attend_ids(csa_checker *c, const csa_attend_args *a)
{
    int64_t groups = a->query.shape[1], rows = a->query.shape[0] * groups;
    for (int64_t row = 0; row < rows && c->status == CSA_OK; row++) {
        int64_t token = row / groups;
        bool active = a->rows ? csa_bool(&a->rows->active, row) : csa_token_active(a->tokens, token);
        int64_t position = a->rows ? csa_i64(&a->rows->positions, row) : csa_token_position(a->tokens, token);
        if (!active)
            continue;
        expect(c, "position of row", row, position, 0, INT64_MAX);
        expect(c, "owner of token", token, given_owner(a->tokens, token), 0, csa_token_requests(a->tokens) - 1);
        if (c->status == CSA_OK)
            check_blocks(c, a->tokens, &a->cache->kv, csa_token_owner(a->tokens, token), position);
        if (c->status == CSA_OK)
            check_list(c, a, row, position);
    }
}
