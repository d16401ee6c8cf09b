/*
 * csa replay: one stage per call.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "replay_parts.h"

#include <math.h>
#include <string.h>

/* ---- Prepare ------------------------------------------------------------------------------------ */

enum { INDEX_VALUES = CSA_SUMMARY_SIZE, MOST = REPLAY_MOST };

/* The RoPE tables hold the rows of the call's tokens, so that token i stands at row i; a negative position
 * stays what it is. */
static csa_tensor table_positions(replay_case *c)
{
    csa_tensor recorded = replay_input(c, "positions", CSA_I64, REPLAY_SHAPE(REPLAY_ANY));
    csa_tensor positions = replay_copy(c, recorded);
    int64_t *values = positions.data;
    for (int64_t i = 0; replay_ok(c) && i < positions.shape[0]; i++)
        values[i] = values[i] < 0 ? values[i] : i;
    return positions;
}

/* A table of bf16 or fp32 rows. */
static csa_tensor rope_table(replay_case *c, const char *name, int64_t tokens, int64_t rotary)
{
    const reader_tensor *table = capture_input(c->what, name);
    csa_dtype dtype = table != NULL && table->view.dtype == CSA_F32 ? CSA_F32 : CSA_BF16;
    return replay_input(c, name, dtype, REPLAY_SHAPE(tokens, rotary));
}

/* A row-major [tokens, columns] tensor as [tokens, groups, heads, width], from column `first` on. */
static csa_tensor split_columns(csa_tensor t, int64_t first, int64_t groups, int64_t heads, int64_t width)
{
    if (t.ndim == 0)
        return t;
    csa_tensor view = {.dtype = t.dtype, .ndim = 4, .shape = {t.shape[0], groups, heads, width}};
    int64_t strides[] = {t.stride[0], heads * width, width, 1};
    for (int i = 0; i < 4; i++)
        view.stride[i] = strides[i];
    if (t.data != NULL)
        view.data = (char *)t.data + first * (int64_t)reader_element(t.dtype);
    return view;
}

/* [tokens, groups, 1, width] as [tokens, groups, width]. */
static csa_tensor without_heads(csa_tensor t)
{
    if (t.ndim == 0)
        return t;
    t.ndim = 3;
    t.shape[2] = t.shape[3];
    t.stride[2] = 1;
    return t;
}

static void prepare_index(replay_case *c, csa_prepare_args *a, int64_t tokens, int64_t rotary)
{
    int64_t groups = replay_integer(c, "groups", 0, MOST), heads = replay_integer(c, "heads", 0, MOST);
    csa_tensor query = replay_input(c, "query", CSA_BF16, REPLAY_SHAPE(tokens, groups * heads * INDEX_VALUES));
    csa_tensor weights = replay_input(c, "weights", CSA_BF16, REPLAY_SHAPE(tokens, groups * heads));
    a->index_query = split_columns(query, 0, groups, heads, INDEX_VALUES);
    a->index_weights = without_heads(split_columns(weights, 0, groups, 1, heads));
    a->index_key = replay_input(c, "key", CSA_BF16, REPLAY_SHAPE(tokens, INDEX_VALUES));
    a->index_query_norm = replay_input(c, "q_weight", CSA_BF16, REPLAY_SHAPE(INDEX_VALUES));
    a->index_key_norm = replay_input(c, "k_weight", CSA_BF16, REPLAY_SHAPE(INDEX_VALUES));
    a->index_key_bias = replay_input(c, "k_bias", CSA_BF16, REPLAY_SHAPE(INDEX_VALUES));
    a->index_rope = rope_table(c, "cos_sin_rows", tokens, rotary);
    a->index_query_out =
        replay_output(c, CSA_E4M3, REPLAY_SHAPE(tokens, groups, CSA_INDEX_HEADS, INDEX_VALUES));
    a->index_key_out = replay_output(c, CSA_BF16, REPLAY_SHAPE(tokens, INDEX_VALUES));
    a->index_weights_out = replay_output(c, CSA_F32, REPLAY_SHAPE(tokens, groups, CSA_INDEX_HEADS));
    a->eps = (float)replay_real(c, "eps");
    a->zero_centered = replay_flag(c, "zero_centered", false);
    a->native_rope = replay_flag(c, "native_rope", false);
}

static const replay_tolerance one_step = {.steps = 1}, two_steps = {.steps = 2};

static void check_index(replay_case *c, const csa_prepare_args *a)
{
    replay_check(c, "query", a->index_query_out, one_step);
    replay_check(c, "weights", a->index_weights_out, REPLAY_EXACT);
    if (!replay_ok(c))
        return;
    csa_tensor key = a->index_key_out;
    replay_check(c, "key", csa_tensor_3d(key.data, CSA_BF16, key.shape[0], 1, INDEX_VALUES), one_step);
}

void replay_prepare_indexer(replay_case *c)
{
    csa_tokens tokens = {.size = sizeof tokens, .positions = table_positions(c)};
    csa_prepare_args a = {.size = sizeof a, .tokens = &tokens};
    prepare_index(c, &a, tokens.positions.shape[0], replay_integer(c, "rotary", 0, MOST));
    REPLAY_CALL(c, csa_prepare(c->context, &a));
    check_index(c, &a);
}

/* The attention part's inputs and outputs. Returns KV groups. */
static int64_t prepare_attention(replay_case *c, csa_prepare_args *a, int64_t tokens)
{
    int64_t groups = replay_integer(c, "kv_heads", 1, MOST), heads = replay_integer(c, "q_heads", 0, MOST);
    int64_t rotary = replay_integer(c, "rotary", 0, MOST), per_group = heads / groups;
    if (heads % groups != 0)
        replay_fault(c, TOOL_BAD_FILE, "q_heads", "no multiple of kv_heads");
    csa_tensor qkv =
        replay_input(c, "qkv", CSA_BF16, REPLAY_SHAPE(tokens, (heads + 2 * groups) * CSA_HEAD_SIZE));
    a->query = split_columns(qkv, 0, groups, per_group, CSA_HEAD_SIZE);
    a->key = without_heads(split_columns(qkv, heads * CSA_HEAD_SIZE, groups, 1, CSA_HEAD_SIZE));
    a->value = without_heads(split_columns(qkv, (heads + groups) * CSA_HEAD_SIZE, groups, 1, CSA_HEAD_SIZE));
    a->query_norm = replay_input(c, "main_q_weight", CSA_BF16, REPLAY_SHAPE(CSA_HEAD_SIZE));
    a->key_norm = replay_input(c, "main_k_weight", CSA_BF16, REPLAY_SHAPE(CSA_HEAD_SIZE));
    if (rotary > 0)
        a->rope = rope_table(c, "main_cos_sin_rows", tokens, rotary);
    a->query_out = replay_output(c, CSA_BF16, REPLAY_SHAPE(tokens, groups, per_group, CSA_HEAD_SIZE));
    a->key_out = replay_output(c, CSA_BF16, REPLAY_SHAPE(tokens, groups, CSA_HEAD_SIZE));
    a->value_out = replay_output(c, CSA_BF16, REPLAY_SHAPE(tokens, groups, CSA_HEAD_SIZE));
    return groups;
}

/* [tokens, ...] as [tokens, columns]: what is recorded of heads. */
static csa_tensor flat_rows(csa_tensor t)
{
    int64_t columns = 1;
    for (int32_t i = 1; i < t.ndim; i++)
        columns *= t.shape[i];
    return t.ndim > 0 ? csa_tensor_2d(t.data, t.dtype, t.shape[0], columns) : t;
}

void replay_prepare(replay_case *c)
{
    csa_tokens tokens = {.size = sizeof tokens, .positions = table_positions(c)};
    csa_cache cache = {.size = sizeof cache};
    csa_prepare_args a = {.size = sizeof a, .tokens = &tokens, .cache = &cache};
    int64_t count = tokens.positions.shape[0];
    tokens.slots = replay_input(c, "slots", CSA_I64, REPLAY_SHAPE(count));
    prepare_index(c, &a, count, CSA_INDEX_ROTARY);
    int64_t groups = prepare_attention(c, &a, count);
    if (groups != replay_integer(c, "groups", 0, MOST))
        replay_fault(c, TOOL_BAD_FILE, "groups", "another number than kv_heads");
    cache.kv = replay_copy(c, replay_kv(c, "cache", &cache, groups));
    REPLAY_CALL(c, csa_prepare(c->context, &a));
    check_index(c, &a);
    replay_check(c, "main_q", flat_rows(a.query_out), one_step);
    replay_check(c, "main_k", flat_rows(a.key_out), one_step);
    replay_check(c, "main_v", flat_rows(a.value_out), REPLAY_EXACT);
    replay_check(c, "cache", cache.kv, (replay_tolerance){.steps = 1, .nan_as_lowest = true});
}

/* ---- Summarize ---------------------------------------------------------------------------------- */

typedef struct summary_call {
    csa_tokens tokens;
    csa_cache cache;
    csa_summarize_args args;
    csa_tensor mean, ring; /* as recorded before the call */
    int64_t count;
} summary_call;

static void renew_cache(replay_case *c, summary_call *s)
{
    s->cache.summaries = replay_copy(c, s->mean);
    s->cache.ring = replay_copy(c, s->ring);
}

static void load_summary(replay_case *c, summary_call *s)
{
    csa_tensor slots = replay_input(c, "slots", CSA_I64, REPLAY_SHAPE(REPLAY_ANY));
    int64_t block_size = replay_integer(c, "block_size", CSA_REGION, MOST);
    *s = (summary_call){.count = slots.shape[0]};
    s->tokens = (csa_tokens){.size = sizeof s->tokens, .slots = slots};
    s->args = (csa_summarize_args){.size = sizeof s->args, .tokens = &s->tokens, .cache = &s->cache};
    s->args.key = replay_input(c, "key", CSA_BF16, REPLAY_SHAPE(s->count, INDEX_VALUES));
    s->args.z = replay_input(c, "z", CSA_BF16, REPLAY_SHAPE(s->count, INDEX_VALUES));
    s->mean =
        replay_input(c, "mean", CSA_E4M3, REPLAY_SHAPE(REPLAY_ANY, block_size / CSA_REGION, INDEX_VALUES));
    s->ring = replay_input(c, "ring", CSA_BF16, REPLAY_SHAPE(REPLAY_ANY, CSA_RING_SIZE));
    s->cache = (csa_cache){.size = sizeof s->cache};
    s->cache.ring_capacity = replay_integer(c, "capacity", 0, INT64_MAX);
    renew_cache(c, s);
}

/* Captures say a ring's base by token, the library takes it by request: the first token that has one.
 * query_start absent: a token per request. */
static csa_tensor ring_bases(replay_case *c, int64_t tokens, csa_tensor query_start)
{
    csa_tensor recorded = replay_input(c, "ring_base", CSA_I64, REPLAY_SHAPE(tokens));
    if (!replay_ok(c) || query_start.ndim == 0)
        return recorded;
    int64_t requests = query_start.shape[0] - 1;
    csa_tensor bases = replay_output(c, CSA_I64, REPLAY_SHAPE(requests));
    const int32_t *starts = query_start.data;
    const int64_t *base = recorded.data;
    int64_t *out = bases.data;
    for (int64_t r = 0; replay_ok(c) && r < requests; r++) {
        int64_t end = starts[r + 1] < tokens ? starts[r + 1] : tokens;
        out[r] = -1;
        for (int64_t i = starts[r] > 0 ? starts[r] : 0; i < end && out[r] < 0; i++)
            out[r] = base[i] < 0 ? -1 : base[i];
    }
    return bases;
}

static csa_tensor query_starts(replay_case *c)
{
    csa_tensor starts = replay_input(c, "query_start", CSA_I32, REPLAY_SHAPE(REPLAY_ANY));
    if (replay_ok(c) && starts.shape[0] < 1)
        replay_fault(c, TOOL_BAD_FILE, "in.query_start", "empty, where requests + 1 entries are expected");
    return starts;
}

static void check_summary(replay_case *c, const summary_call *s)
{
    replay_check(c, "mean", s->cache.summaries, two_steps);
    replay_check(c, "ring", s->cache.ring, REPLAY_EXACT);
}

void replay_summarize_decode(replay_case *c)
{
    summary_call s;
    load_summary(c, &s);
    s.tokens.positions = replay_input(c, "positions", CSA_I64, REPLAY_SHAPE(s.count));
    s.tokens.ring_base = ring_bases(c, s.count, (csa_tensor){0});
    REPLAY_CALL(c, csa_summarize_decode(c->context, &s.args));
    check_summary(c, &s);
}

/* The most tokens that any request has, at least 1. */
static int32_t longest_query(replay_case *c, csa_tensor query_start, int64_t tokens)
{
    const int32_t *starts = query_start.data;
    int64_t most = 1;
    for (int64_t r = 0; replay_ok(c) && r + 1 < query_start.shape[0]; r++) {
        int64_t length = (int64_t)starts[r + 1] - starts[r];
        most = length > most ? length : most;
    }
    most = most < tokens ? most : tokens;
    return most > 1 ? (int32_t)(most < MOST ? most : MOST) : 1;
}

void replay_summarize_verify(replay_case *c)
{
    summary_call s;
    load_summary(c, &s);
    s.tokens.query_start = query_starts(c);
    s.tokens.seq_lens = replay_input(c, "seq_lens", CSA_I32, REPLAY_SHAPE(s.tokens.query_start.shape[0] - 1));
    s.tokens.ring_base = ring_bases(c, s.count, s.tokens.query_start);
    s.tokens.query_len = longest_query(c, s.tokens.query_start, s.count);
    REPLAY_CALL(c, csa_summarize_verify(c->context, &s.args));
    check_summary(c, &s);
}

/* Prefill once more, with metadata of our own instead of what the call finds itself. */
static void prefill_planned(replay_case *c, summary_call s, csa_tensor metadata)
{
    csa_tensor mean = s.cache.summaries, ring = s.cache.ring;
    renew_cache(c, &s);
    s.args.tokens = &s.tokens;
    s.args.cache = &s.cache;
    s.args.metadata = metadata;
    REPLAY_CALL(c, csa_summarize_prefill(c->context, &s.args));
    replay_agree(c, "mean by metadata", s.cache.summaries, mean, NULL);
    replay_agree(c, "ring by metadata", s.cache.ring, ring, NULL);
}

void replay_summarize_prefill(replay_case *c)
{
    summary_call s;
    load_summary(c, &s);
    s.tokens.query_start = query_starts(c);
    s.tokens.owners = replay_input(c, "owners", CSA_I64, REPLAY_SHAPE(s.count));
    s.tokens.positions = replay_input(c, "positions", CSA_I64, REPLAY_SHAPE(s.count));
    s.tokens.ring_base = ring_bases(c, s.count, s.tokens.query_start);
    csa_tensor metadata = replay_output(c, CSA_I64, REPLAY_SHAPE(s.count, 10));
    REPLAY_CALL(c, csa_summarize_prefill(c->context, &s.args));
    check_summary(c, &s);
    csa_summarize_args plan = s.args;
    plan.metadata = metadata;
    REPLAY_CALL(c, csa_summarize_metadata(c->context, &plan));
    replay_check(c, "metadata", metadata, REPLAY_EXACT);
    prefill_planned(c, s, metadata);
}

/* ---- Score, select, attend, gate ---------------------------------------------------------------- */

void replay_score_decode(replay_case *c)
{
    int64_t groups = replay_integer(c, "row_groups", 1, MOST);
    replay_scoring s = {0};
    replay_load_tokens(c, &s, groups);
    csa_tensor query =
        replay_input(c, "query", CSA_E4M3, REPLAY_SHAPE(s.count, groups, REPLAY_ANY, INDEX_VALUES));
    csa_tensor weights = replay_input(c, "weights", CSA_F32, REPLAY_SHAPE(s.count, groups, query.shape[2]));
    replay_load_scoring(c, &s, query, weights);
    replay_score_rows(c, &s);
    replay_check_rows(c, &s, true);
    replay_check_scores(c, "scores", s.scores, replay_scorer_of(&s));
}

void replay_select(replay_case *c)
{
    csa_tensor current = replay_input(c, "current", CSA_I64, REPLAY_SHAPE(REPLAY_ANY));
    csa_tensor scores = replay_input(c, "scores", CSA_F32, REPLAY_SHAPE(current.shape[0], REPLAY_ANY));
    int64_t topk = replay_integer(c, "topk", 1, INT32_MAX);
    csa_tensor selected = replay_select_rows(c, scores, current, topk);
    replay_check_selected(c, "regions", selected, scores, current.data, topk);
}

/* The tool's own view of rows that a capture gives one by one. */
static judge_row *given_rows(replay_case *c, const csa_rows *rows, int64_t per_request)
{
    int64_t count = rows->active.shape[0];
    judge_row *places = replay_memory(c, count, sizeof *places);
    const uint8_t *active = rows->active.data;
    const int64_t *positions = rows->positions.data;
    for (int64_t i = 0; replay_ok(c) && i < count; i++)
        places[i] = (judge_row){active[i] != 0, positions[i], i / per_request};
    return places;
}

void replay_attend_decode(replay_case *c)
{
    int64_t groups = replay_integer(c, "groups", 1, MOST), query_len = replay_integer(c, "query_len", 1, MOST);
    csa_tokens tokens = {.size = sizeof tokens, .query_len = (int32_t)query_len};
    csa_cache cache = {.size = sizeof cache};
    csa_rows rows = {.size = sizeof rows};
    tokens.block_table = replay_input(c, "table", CSA_I32, REPLAY_SHAPE(REPLAY_ANY, REPLAY_ANY));
    int64_t count = tokens.block_table.shape[0] * query_len;
    rows.positions = replay_input(c, "positions", CSA_I64, REPLAY_SHAPE(count * groups));
    rows.active = replay_input(c, "active", CSA_BOOL, REPLAY_SHAPE(count * groups));
    csa_tensor list = replay_input(c, "regions", CSA_I64, REPLAY_SHAPE(count * groups, REPLAY_ANY));
    cache.kv = replay_kv(c, "kv_cache", &cache, groups);
    replay_attention a;
    replay_load_attention(c, &a, &tokens, &cache, count, groups);
    replay_attend_rows(c, &a, list, &rows);
    replay_check_attended(c, "out", a.out, &a, list, given_rows(c, &rows, groups * query_len));
}

/* Entries to compare: not those of an inactive token that the reference made NaN of (section 8). */
static int64_t *gate_limits(replay_case *c, csa_tensor active, csa_tensor recorded)
{
    int64_t *limits = replay_memory(c, recorded.shape[0], sizeof *limits), columns = recorded.shape[1];
    for (int64_t t = 0; replay_ok(c) && t < recorded.shape[0]; t++) {
        bool nan = false;
        for (int64_t i = 0; i < columns; i++)
            nan |= isnan(judge_value(CSA_BF16, recorded.data, t * columns + i));
        limits[t] = nan && active.ndim > 0 && ((const uint8_t *)active.data)[t] == 0 ? 0 : columns;
    }
    return limits;
}

/* An inactive token gives zeros, whatever was recorded. */
static void check_inactive(replay_case *c, csa_tensor out, csa_tensor active)
{
    csa_tensor expected = replay_copy(c, out);
    size_t bytes = (size_t)out.shape[1] * sizeof(uint16_t);
    for (int64_t t = 0; replay_ok(c) && t < active.shape[0]; t++)
        if (((const uint8_t *)active.data)[t] == 0)
            memset((char *)expected.data + (size_t)t * bytes, 0, bytes);
    replay_agree(c, "inactive tokens", out, expected, NULL);
}

void replay_gate(replay_case *c)
{
    csa_tensor gate = replay_input(c, "gate", CSA_BF16, REPLAY_SHAPE(REPLAY_ANY, REPLAY_ANY));
    int64_t tokens = gate.shape[0], heads = gate.shape[1];
    csa_tensor in = replay_input(c, "attention", CSA_BF16, REPLAY_SHAPE(tokens, heads * CSA_HEAD_SIZE));
    csa_gate_args a = {.size = sizeof a, .gate = gate};
    if (replay_has(c, "active"))
        a.active = replay_input(c, "active", CSA_BOOL, REPLAY_SHAPE(tokens));
    csa_tensor out = replay_output(c, CSA_BF16, REPLAY_SHAPE(tokens, heads * CSA_HEAD_SIZE));
    if (!replay_ok(c))
        return;
    a.attention = csa_tensor_3d(in.data, CSA_BF16, tokens, heads, CSA_HEAD_SIZE);
    a.out = csa_tensor_3d(out.data, CSA_BF16, tokens, heads, CSA_HEAD_SIZE);
    REPLAY_CALL(c, csa_gate(c->context, &a));
    csa_tensor recorded = replay_take(c, "out", out);
    replay_tolerance tolerance = {.steps = 1};
    if (recorded.ndim > 0 && recorded.shape[0] == tokens)
        tolerance.limits = gate_limits(c, a.active, recorded);
    replay_check(c, "out", out, tolerance);
    if (a.active.ndim > 0)
        check_inactive(c, out, a.active);
}
