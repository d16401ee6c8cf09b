/*
 * csa replay: the reference's page lists, gathered rows and staged blocks.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "replay_compat.h"

#include <csa/csa_compat.h>

/* The first entries of a list, as many as the last of `ends` says. */
static csa_tensor entries_of(replay_case *c, csa_tensor list, csa_tensor ends)
{
    if (!replay_ok(c))
        return list;
    int64_t count = ((const int32_t *)ends.data)[ends.shape[0] - 1];
    count = count < 0 ? 0 : count;
    return replay_rows(list, 0, count < list.shape[0] ? count : list.shape[0]);
}

static const replay_tolerance by_data = {.free_size = true};

/* ---- Page lists --------------------------------------------------------------------------------- */

static csa_compat_pages_args list_pages(replay_case *c, const csa_tokens *tokens, const csa_cache *cache,
                                        csa_tensor selected)
{
    int64_t rows = selected.shape[0];
    csa_compat_pages_args a = {.size = sizeof a, .tokens = tokens, .cache = cache, .selected = selected};
    a.page_indptr = replay_output(c, CSA_I32, REPLAY_SHAPE(rows + 1));
    a.page_counts = replay_output(c, CSA_I32, REPLAY_SHAPE(rows));
    a.last_page_len = replay_output(c, CSA_I32, REPLAY_SHAPE(rows));
    a.pages = replay_output(c, CSA_I32, REPLAY_SHAPE(rows * selected.shape[1]));
    REPLAY_CALL(c, csa_compat_pages(c->context, &a));
    replay_check(c, "pages", entries_of(c, a.pages, a.page_indptr), by_data);
    replay_check(c, "page_indptr", a.page_indptr, REPLAY_EXACT);
    return a;
}

void replay_attend_pages(replay_case *c, const replay_scoring *s, replay_attention *a, csa_tensor selected)
{
    if (!replay_ok(c))
        return;
    csa_status status = csa_compat_paged_supported(c->context, &s->cache, a->query.shape[1]);
    if (status != CSA_OK && !replay_recorded(c, "pages"))
        return;
    csa_compat_pages_args pages = list_pages(c, &s->tokens, &s->cache, selected);
    if (status != CSA_OK) {
        replay_skip(c, "out_paged", "attention over pages is not for this cache or number of heads");
        return;
    }
    csa_compat_attend_paged_args p = {.size = sizeof p, .cache = &s->cache, .query = a->query};
    p.pages = pages.pages;
    p.page_indptr = pages.page_indptr;
    p.page_counts = pages.page_counts;
    p.last_page_len = pages.last_page_len;
    p.scale = a->args.scale;
    p.out = replay_output(c, CSA_BF16, 3, a->query.shape);
    REPLAY_CALL(c, csa_compat_attend_paged(c->context, &p));
    replay_check_attended(c, "out_paged", p.out, a, selected, s->places);
}

/* ---- Gathered rows ------------------------------------------------------------------------------ */

/* Room for rows of a selection that is `columns` wide. */
static csa_compat_gather_args gather_args(replay_case *c, int64_t rows, int64_t columns)
{
    csa_compat_gather_args a = {.size = sizeof a};
    int64_t tokens = rows * columns * CSA_REGION;
    a.cu_k = replay_output(c, CSA_I32, REPLAY_SHAPE(rows + 1));
    a.key = replay_output(c, CSA_BF16, REPLAY_SHAPE(tokens, 1, CSA_HEAD_SIZE));
    a.value = replay_output(c, CSA_BF16, REPLAY_SHAPE(tokens, 1, CSA_HEAD_SIZE));
    return a;
}

/* Gathers and attends some rows of a step; returns the time of both. */
static double attend_some(replay_case *c, const replay_scoring *s, csa_compat_gather_args g,
                          csa_compat_attend_ragged_args r, int64_t first, int64_t rows)
{
    csa_tokens tokens = s->tokens;
    tokens.positions = replay_rows(tokens.positions, first, rows);
    tokens.owners = replay_rows(tokens.owners, first, rows);
    g.tokens = &tokens;
    g.selected = replay_rows(g.selected, first, rows);
    g.cu_k = replay_rows(g.cu_k, 0, rows + 1);
    r.query = replay_rows(r.query, first, rows);
    r.out = replay_rows(r.out, first, rows);
    r.cu_k = g.cu_k;
    REPLAY_CALL(c, csa_compat_gather(c->context, &g));
    double seconds = c->seconds;
    REPLAY_CALL(c, csa_compat_attend_ragged(c->context, &r));
    return seconds + c->seconds;
}

void replay_attend_gathered(replay_case *c, const replay_scoring *s, replay_attention *a, csa_tensor selected)
{
    enum { ROWS = CSA_COMPAT_RAGGED_ROWS };
    int64_t most = s->count < ROWS ? s->count : ROWS;
    csa_compat_gather_args g = gather_args(c, most, selected.shape[1]);
    csa_compat_attend_ragged_args r = {.size = sizeof r, .query = a->query, .key = g.key, .value = g.value};
    double seconds = 0;
    g.cache = &s->cache;
    g.selected = selected;
    r.scale = a->args.scale;
    r.out = replay_output(c, CSA_BF16, 3, a->query.shape);
    for (int64_t first = 0; replay_ok(c) && first < s->count; first += ROWS)
        seconds += attend_some(c, s, g, r, first, s->count - first < ROWS ? s->count - first : ROWS);
    c->seconds = seconds;
    replay_check_attended(c, "out_ragged", r.out, a, selected, s->places);
}

/* ---- Staging ------------------------------------------------------------------------------------ */

/* Most blocks that requests of these lengths can have. */
static int64_t count_blocks(replay_case *c, const csa_tokens *tokens, int64_t block_size)
{
    const int32_t *lengths = tokens->seq_lens.data;
    int64_t blocks = 0, columns = tokens->block_table.shape[1];
    for (int64_t r = 0; replay_ok(c) && r < tokens->seq_lens.shape[0]; r++) {
        int64_t live = lengths[r] > 0 ? (lengths[r] + block_size - 1) / block_size : 0;
        blocks += live < columns ? live : columns;
    }
    return blocks;
}

static void stage(replay_case *c, const csa_tokens *tokens, const csa_cache *cache)
{
    int64_t block_size = cache->kv.ndim > 0 ? cache->kv.shape[2] : 1;
    int64_t room = count_blocks(c, tokens, block_size);
    csa_compat_stage_args a = {.size = sizeof a, .tokens = tokens, .cache = cache};
    a.staged = replay_output(c, CSA_BF16, REPLAY_SHAPE(room, 1, block_size, CSA_KV_SIZE));
    a.staged_pages = replay_output(c, CSA_I32, REPLAY_SHAPE(room));
    a.staged_table = replay_output(c, CSA_I32, 2, tokens->block_table.shape);
    a.staged_count = replay_output(c, CSA_I32, REPLAY_SHAPE(1));
    REPLAY_CALL(c, csa_compat_stage(c->context, &a));
    replay_check(c, "staged", entries_of(c, a.staged, a.staged_count), by_data);
    replay_check(c, "staged_pages", entries_of(c, a.staged_pages, a.staged_count), by_data);
    replay_check(c, "staged_table", a.staged_table, REPLAY_EXACT);
}

/* ---- The op ------------------------------------------------------------------------------------- */

void replay_gather(replay_case *c)
{
    csa_tokens tokens = {.size = sizeof tokens};
    csa_cache cache = {.size = sizeof cache};
    tokens.positions = replay_input(c, "positions", CSA_I64, REPLAY_SHAPE(REPLAY_ANY));
    int64_t rows = tokens.positions.shape[0];
    tokens.owners = replay_input(c, "owners", CSA_I64, REPLAY_SHAPE(rows));
    tokens.block_table = replay_input(c, "table", CSA_I32, REPLAY_SHAPE(REPLAY_ANY, REPLAY_ANY));
    csa_tensor list = replay_input(c, "regions", CSA_I64, REPLAY_SHAPE(rows, REPLAY_ANY));
    cache.kv = replay_kv(c, "kv_cache", &cache, 1);
    csa_compat_gather_args a = gather_args(c, rows, list.shape[1]);
    a.tokens = &tokens;
    a.cache = &cache;
    a.selected = list;
    REPLAY_CALL(c, csa_compat_gather(c->context, &a));
    replay_check(c, "cu_k", a.cu_k, REPLAY_EXACT);
    replay_check(c, "key", entries_of(c, a.key, a.cu_k), by_data);
    replay_check(c, "value", entries_of(c, a.value, a.cu_k), by_data);
    csa_compat_pages_args pages = list_pages(c, &tokens, &cache, list);
    replay_check(c, "last_page_len", pages.last_page_len, REPLAY_EXACT);
    tokens.seq_lens = replay_list(c, "lengths", tokens.block_table.shape[0]);
    stage(c, &tokens, &cache);
}
