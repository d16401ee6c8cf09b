/*
 * csa replay: scoring, selection and attention.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "replay_parts.h"

#include <jansson.h>

void *replay_memory(replay_case *c, int64_t count, size_t size)
{
    return replay_output(c, CSA_U8, REPLAY_SHAPE(count, (int64_t)size)).data;
}

/* ---- Tokens and rows ---------------------------------------------------------------------------- */

static void place_decode(replay_case *c, replay_scoring *s)
{
    const int32_t *seq_lens = s->tokens.seq_lens.data;
    const int64_t *slots = s->tokens.slots.data;
    int64_t query_len = s->tokens.query_len;
    s->places = replay_memory(c, s->count * s->groups, sizeof *s->places);
    if (!replay_ok(c) || slots == NULL) /* a fault, or no token at all */
        return;
    for (int64_t row = 0; row < s->count * s->groups; row++) {
        int64_t token = row / s->groups, request = token / query_len;
        int64_t seen = seq_lens[request] - (query_len - 1 - token % query_len);
        s->places[row] = judge_row_of(request, seen, slots[token]);
    }
}

void replay_load_tokens(replay_case *c, replay_scoring *s, int64_t groups)
{
    bool said = json_object_get(c->what->scalars, "query_len") != NULL;
    int64_t query_len = said ? replay_integer(c, "query_len", 1, REPLAY_MOST) : 1;
    csa_tensor seq_lens = replay_input(c, "seq_lens", CSA_I32, REPLAY_SHAPE(REPLAY_ANY));
    s->count = seq_lens.shape[0] * query_len;
    s->groups = groups;
    s->tokens = (csa_tokens){.size = sizeof s->tokens, .seq_lens = seq_lens, .query_len = (int32_t)query_len};
    s->tokens.block_table = replay_input(c, "table", CSA_I32, REPLAY_SHAPE(seq_lens.shape[0], REPLAY_ANY));
    s->tokens.slots = replay_input(c, "slots", CSA_I64, REPLAY_SHAPE(s->count));
    place_decode(c, s);
}

static void place_prefill(replay_case *c, replay_scoring *s)
{
    const int64_t *positions = s->tokens.positions.data, *owners = s->tokens.owners.data;
    s->places = replay_memory(c, s->count, sizeof *s->places);
    if (!replay_ok(c) || owners == NULL) /* a fault, or no token at all */
        return;
    for (int64_t row = 0; row < s->count; row++) {
        int64_t seen = positions[row] < INT64_MAX ? positions[row] + 1 : INT64_MAX;
        s->places[row] = judge_row_of(owners[row], seen, 0);
    }
}

void replay_load_prefill(replay_case *c, replay_scoring *s)
{
    csa_tensor positions = replay_input(c, "positions", CSA_I64, REPLAY_SHAPE(REPLAY_ANY));
    s->count = positions.shape[0];
    s->groups = 1;
    s->tokens = (csa_tokens){.size = sizeof s->tokens, .positions = positions};
    s->tokens.owners = replay_input(c, "owners", CSA_I64, REPLAY_SHAPE(s->count));
    s->tokens.block_table = replay_input(c, "table", CSA_I32, REPLAY_SHAPE(REPLAY_ANY, REPLAY_ANY));
    place_prefill(c, s);
}

/* ---- Scores ------------------------------------------------------------------------------------- */

csa_rows replay_row_outputs(replay_case *c, int64_t rows)
{
    return (csa_rows){.size = sizeof(csa_rows),
                      .active = replay_output(c, CSA_BOOL, REPLAY_SHAPE(rows)),
                      .positions = replay_output(c, CSA_I64, REPLAY_SHAPE(rows)),
                      .current = replay_output(c, CSA_I64, REPLAY_SHAPE(rows)),
                      .lengths = replay_output(c, CSA_I32, REPLAY_SHAPE(rows)),
                      .topk_lengths = replay_output(c, CSA_I32, REPLAY_SHAPE(rows))};
}

void replay_load_scoring(replay_case *c, replay_scoring *s, csa_tensor query, csa_tensor weights)
{
    int64_t rows = s->count * s->groups;
    s->regions = replay_integer(c, "regions", 0, INT64_MAX);
    s->query = query;
    s->weights = weights;
    s->cache.size = sizeof s->cache;
    s->cache.summaries =
        replay_input(c, "mean", CSA_E4M3, REPLAY_SHAPE(REPLAY_ANY, REPLAY_ANY, CSA_SUMMARY_SIZE));
    s->scores = replay_output(c, CSA_F32, REPLAY_SHAPE(rows, s->regions));
    s->rows = replay_row_outputs(c, rows);
    s->judge = (judge_cache){.table = s->tokens.block_table, .summaries = s->cache.summaries};
    s->loaded_row = -1;
    s->limits = replay_memory(c, rows, sizeof *s->limits);
    for (int64_t row = 0; replay_ok(c) && row < rows; row++) {
        int64_t length = s->places[row].position / CSA_REGION + 1;
        s->limits[row] = length < s->regions ? length : s->regions;
    }
}

void replay_score_rows(replay_case *c, replay_scoring *s)
{
    csa_score_args a = {.size = sizeof a,
                        .tokens = &s->tokens,
                        .cache = &s->cache,
                        .query = s->query,
                        .weights = s->weights,
                        .scores = s->scores,
                        .rows_out = &s->rows};
    REPLAY_CALL(c, csa_score(c->context, &a));
}

static void score_row(void *data, int64_t row, int64_t region, float *score, double *bound)
{
    replay_scoring *s = data;
    if (row != s->loaded_row)
        judge_load_query(&s->loaded, CSA_E4M3, s->query.data, s->weights.data, row, s->query.shape[2],
                         (int32_t)s->query.shape[2]);
    s->loaded_row = row;
    judge_score(&s->loaded, judge_summary(&s->judge, s->places[row].request, region), score, bound);
}

replay_scorer replay_scorer_of(replay_scoring *s)
{
    return (replay_scorer){score_row, s, s->limits, NULL};
}

/* The tool's own row metadata. */
static csa_rows expected_rows(replay_case *c, const replay_scoring *s)
{
    csa_rows rows = replay_row_outputs(c, s->count * s->groups);
    for (int64_t i = 0; replay_ok(c) && i < s->count * s->groups; i++) {
        int64_t current = s->places[i].position / CSA_REGION;
        ((uint8_t *)rows.active.data)[i] = s->places[i].active;
        ((int64_t *)rows.positions.data)[i] = s->places[i].position;
        ((int64_t *)rows.current.data)[i] = current;
        ((int32_t *)rows.lengths.data)[i] = (int32_t)(current + 1);
        ((int32_t *)rows.topk_lengths.data)[i] = (int32_t)current;
    }
    return rows;
}

void replay_check_rows(replay_case *c, const replay_scoring *s, bool keep_all)
{
    csa_rows own = expected_rows(c, s);
    replay_check_judged(c, "active", s->rows.active, own.active);
    replay_check_judged(c, "positions", s->rows.positions, own.positions);
    replay_check_judged(c, "current", s->rows.current, own.current);
    replay_check_judged(c, "lengths", s->rows.lengths, own.lengths);
    replay_check_judged(c, "topk_lengths", s->rows.topk_lengths, own.topk_lengths);
    replay_keep(c, "active", s->rows.active, NULL);
    replay_keep(c, "positions", s->rows.positions, NULL);
    if (!keep_all)
        return;
    replay_keep(c, "current", s->rows.current, NULL);
    replay_keep(c, "lengths", s->rows.lengths, NULL);
    replay_keep(c, "topk_lengths", s->rows.topk_lengths, NULL);
}

/* ---- Selection ---------------------------------------------------------------------------------- */

csa_tensor replay_select_rows(replay_case *c, csa_tensor scores, csa_tensor current, int64_t topk)
{
    int64_t width = topk < scores.shape[1] ? topk : scores.shape[1];
    csa_tensor selected = replay_output(c, CSA_I64, REPLAY_SHAPE(current.shape[0], width + 1));
    csa_select_args a = {
        .size = sizeof a, .scores = scores, .current = current, .selected = selected, .topk = (int32_t)topk};
    REPLAY_CALL(c, csa_select(c->context, &a));
    return selected;
}

/* ---- Attention ---------------------------------------------------------------------------------- */

csa_tensor replay_kv(replay_case *c, const char *name, csa_cache *cache, int64_t groups)
{
    bool fp8 = replay_flag(c, "fp8", false);
    int64_t block_size = replay_integer(c, "block_size", 1, REPLAY_MOST);
    cache->size = sizeof *cache;
    if (fp8) {
        cache->k_scale = replay_input(c, "k_scale", CSA_F32, REPLAY_SHAPE(1)).data;
        cache->v_scale = replay_input(c, "v_scale", CSA_F32, REPLAY_SHAPE(1)).data;
    }
    return replay_input(c, name, fp8 ? CSA_E4M3 : CSA_BF16,
                        REPLAY_SHAPE(REPLAY_ANY, groups, block_size, CSA_KV_SIZE));
}

/* [R, heads, 192] as [T, G, heads, 192], [R, heads] as [T, G, heads]. */
static csa_tensor by_token(csa_tensor t, int64_t groups)
{
    if (t.ndim == 0)
        return t;
    if (t.ndim == 2)
        return csa_tensor_3d(t.data, t.dtype, t.shape[0] / groups, groups, t.shape[1]);
    return csa_tensor_4d(t.data, t.dtype, t.shape[0] / groups, groups, t.shape[1], t.shape[2]);
}

void replay_renew_attention(replay_case *c, replay_attention *a)
{
    a->out = replay_output(c, CSA_BF16, 3, a->query.shape);
    a->lse = replay_output(c, CSA_F32, 2, a->query.shape);
}

void replay_load_attention(replay_case *c, replay_attention *a, const csa_tokens *tokens,
                           const csa_cache *cache, int64_t count, int64_t groups)
{
    *a = (replay_attention){.groups = groups};
    a->query = replay_input(c, "query", CSA_BF16, REPLAY_SHAPE(count * groups, REPLAY_ANY, CSA_HEAD_SIZE));
    int64_t heads = a->query.shape[1];
    csa_tensor gate = {0};
    if (replay_has(c, "gate"))
        gate = replay_input(c, "gate", CSA_BF16, REPLAY_SHAPE(count, groups * heads));
    a->args = (csa_attend_args){.size = sizeof a->args, .tokens = tokens, .cache = cache};
    a->args.query = by_token(a->query, groups);
    if (gate.ndim > 0)
        a->args.gate = csa_tensor_3d(gate.data, CSA_BF16, count, groups, heads);
    a->args.scale = (float)replay_real(c, "scale");
    replay_renew_attention(c, a);
    a->judged = (judge_cache){.table = tokens->block_table, .kv = cache->kv, .k_scale = 1, .v_scale = 1};
    if (replay_ok(c) && cache->k_scale != NULL) {
        a->judged.k_scale = (double)*cache->k_scale;
        a->judged.v_scale = (double)*cache->v_scale;
    }
    a->judge =
        (judge_attend_args){.cache = &a->judged, .scale = (double)a->args.scale, .heads = (int32_t)heads};
    a->judge.query = a->query.data;
    a->judge.gate = gate.data;
}

void replay_bind_attention(replay_attention *a)
{
    a->args.out = by_token(a->out, a->groups);
    a->args.lse = by_token(a->lse, a->groups);
}

void replay_attend_rows(replay_case *c, replay_attention *a, csa_tensor selected, const csa_rows *rows)
{
    replay_bind_attention(a);
    a->args.selected = selected;
    a->args.rows = rows;
    REPLAY_CALL(c, csa_attend(c->context, &a->args));
}

void replay_check_attended(replay_case *c, const char *name, csa_tensor got, replay_attention *a,
                           csa_tensor selected, const judge_row *rows)
{
    a->judge.list = selected.data;
    a->judge.columns = selected.shape[1];
    replay_check_attention(c, name, got, &a->judge, rows, a->groups);
}

void replay_judge_attended(replay_case *c, const char *what, csa_tensor got, replay_attention *a,
                           csa_tensor selected, const judge_row *rows)
{
    a->judge.list = selected.data;
    a->judge.columns = selected.shape[1];
    replay_judge_attention(c, what, got, &a->judge, rows, a->groups);
}
