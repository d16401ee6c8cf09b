/*
 * csa inspect: what cases of a capture know of their rows. Recorded scores and selections are used where there
 * are some; others are computed by the library.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "inspect.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

enum { OTHERWISE_TOPK = 16, MOST_REGIONS = 1 << 24 };

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

int64_t inspect_seen(const inspect_view *v, int64_t row)
{
    const judge_row *place = &v->places[row];
    return place->active && place->position >= 0 ? least(place->position / CSA_REGION + 1, v->regions) : 0;
}

/* ---- Scores and selections ---------------------------------------------------------------------- */

/* A recorded output that is whole. */
static const void *recorded(replay_case *c, const char *name, csa_dtype dtype, int64_t rows, int64_t columns)
{
    if (!replay_ok(c) || !replay_recorded(c, name) || capture_corner(c->what, name))
        return NULL;
    return replay_record(c, name, dtype, REPLAY_SHAPE(rows, columns)).data;
}

static const char *back_end(const inspect_view *v)
{
    return csa_backend_name(csa_context_backend(v->c.context));
}

static void take_scores(inspect_view *v)
{
    replay_case *c = &v->c;
    v->scores = recorded(c, "scores", CSA_F32, v->rows, v->regions);
    v->scores_from = "recorded";
    if (v->scores || !replay_ok(c))
        return;
    replay_score_rows(c, &v->scoring);
    v->scores = v->scoring.scores.data;
    v->scores_from = back_end(v);
}

/* Selects from the scores. */
static void compute_selection(inspect_view *v)
{
    replay_case *c = &v->c;
    csa_tensor current = replay_output(c, CSA_I64, REPLAY_SHAPE(v->rows));
    for (int64_t row = 0; replay_ok(c) && row < v->rows; row++)
        ((int64_t *)current.data)[row] = inspect_seen(v, row) - 1;
    if (!replay_ok(c))
        return;
    csa_tensor scores = csa_tensor_2d(v->scores, CSA_F32, v->rows, v->regions);
    csa_tensor selected = replay_select_rows(c, scores, current, v->topk);
    v->selected = selected.data;
    v->columns = selected.shape[1];
    v->selected_from = back_end(v);
}

/* The recorded selection, unless another topk was asked for. */
static void take_selection(inspect_view *v, const inspect_options *o, const char *name)
{
    replay_case *c = &v->c;
    bool own = json_object_get(c->what->scalars, "topk") != NULL;
    int64_t topk = own ? replay_integer(c, "topk", 1, INT32_MAX) : OTHERWISE_TOPK;
    v->topk = o->topk > 0 ? o->topk : topk;
    v->columns = least(topk, v->regions) + 1;
    if (own && (o->topk == 0 || o->topk == topk))
        v->selected = recorded(c, name, CSA_I64, v->rows, v->columns);
    v->selected_from = "recorded";
    if (!v->selected)
        compute_selection(v);
}

/* ---- Ops ---------------------------------------------------------------------------------------- */

static void take_rows(inspect_view *v)
{
    v->rows = v->scoring.count * v->scoring.groups;
    v->groups = v->scoring.groups;
    v->regions = v->scoring.regions;
    v->places = v->scoring.places;
    v->positions = true;
}

static void take_attention(inspect_view *v)
{
    replay_scoring *s = &v->scoring;
    s->cache.kv = replay_kv(&v->c, "kv_cache", &s->cache, v->groups);
    replay_load_attention(&v->c, &v->attention, &s->tokens, &s->cache, s->count, v->groups);
    v->heads = v->attention.query.shape[1];
}

static void load_score_decode(inspect_view *v, const inspect_options *o)
{
    replay_case *c = &v->c;
    replay_scoring *s = &v->scoring;
    int64_t groups = replay_integer(c, "row_groups", 1, REPLAY_MOST);
    replay_load_tokens(c, s, groups);
    csa_tensor query =
        replay_input(c, "query", CSA_E4M3, REPLAY_SHAPE(s->count, groups, REPLAY_ANY, CSA_SUMMARY_SIZE));
    csa_tensor weights = replay_input(c, "weights", CSA_F32, REPLAY_SHAPE(s->count, groups, query.shape[2]));
    replay_load_scoring(c, s, query, weights);
    take_rows(v);
    take_scores(v);
    take_selection(v, o, "regions");
}

static void load_step(inspect_view *v, const inspect_options *o)
{
    replay_case *c = &v->c;
    replay_scoring *s = &v->scoring;
    csa_tensor query = replay_input(c, "index_query", CSA_E4M3,
                                    REPLAY_SHAPE(s->count, s->groups, REPLAY_ANY, CSA_SUMMARY_SIZE));
    csa_tensor weights =
        replay_input(c, "index_weights", CSA_F32, REPLAY_SHAPE(s->count, s->groups, query.shape[2]));
    replay_load_scoring(c, s, query, weights);
    take_rows(v);
    take_attention(v);
    take_scores(v);
    take_selection(v, o, "regions");
}

static void load_decode_step(inspect_view *v, const inspect_options *o)
{
    replay_load_tokens(&v->c, &v->scoring, replay_integer(&v->c, "groups", 1, REPLAY_MOST));
    load_step(v, o);
}

static void load_prefill_step(inspect_view *v, const inspect_options *o)
{
    replay_load_prefill(&v->c, &v->scoring);
    load_step(v, o);
}

/* Rows know their current region and no more. */
static void load_select(inspect_view *v, const inspect_options *o)
{
    replay_case *c = &v->c;
    csa_tensor current = replay_input(c, "current", CSA_I64, REPLAY_SHAPE(REPLAY_ANY));
    csa_tensor scores = replay_input(c, "scores", CSA_F32, REPLAY_SHAPE(current.shape[0], REPLAY_ANY));
    judge_row *places = replay_memory(c, current.shape[0], sizeof *places);
    v->rows = current.shape[0];
    v->groups = 1;
    v->regions = scores.shape[1];
    v->places = places;
    v->scores = scores.data;
    v->scores_from = "input";
    for (int64_t i = 0; replay_ok(c) && i < v->rows; i++) {
        int64_t region = least(((const int64_t *)current.data)[i], v->regions - 1);
        places[i] = judge_row_of(-1, (region + 1) * CSA_REGION, 0);
    }
    take_selection(v, o, "regions");
}

static void place_given_rows(inspect_view *v, csa_tensor positions, csa_tensor active, int64_t per_request)
{
    judge_row *places = replay_memory(&v->c, v->rows, sizeof *places);
    v->places = places;
    for (int64_t i = 0; replay_ok(&v->c) && i < v->rows; i++)
        places[i] = (judge_row){((const uint8_t *)active.data)[i] != 0, ((const int64_t *)positions.data)[i],
                                i / per_request};
}

/* No scores, and a list that may hold anything. */
static void load_attend(inspect_view *v, const inspect_options *o)
{
    replay_case *c = &v->c;
    replay_scoring *s = &v->scoring;
    int64_t groups = replay_integer(c, "groups", 1, REPLAY_MOST);
    int64_t query_len = replay_integer(c, "query_len", 1, REPLAY_MOST);
    int64_t block_size = replay_integer(c, "block_size", 1, REPLAY_MOST);
    s->tokens = (csa_tokens){.size = sizeof s->tokens, .query_len = (int32_t)query_len};
    s->tokens.block_table = replay_input(c, "table", CSA_I32, REPLAY_SHAPE(REPLAY_ANY, REPLAY_ANY));
    s->count = s->tokens.block_table.shape[0] * query_len;
    v->groups = groups;
    v->rows = s->count * groups;
    csa_tensor positions = replay_input(c, "positions", CSA_I64, REPLAY_SHAPE(v->rows));
    csa_tensor active = replay_input(c, "active", CSA_BOOL, REPLAY_SHAPE(v->rows));
    csa_tensor list = replay_input(c, "regions", CSA_I64, REPLAY_SHAPE(v->rows, REPLAY_ANY));
    if (replay_ok(c) && s->tokens.block_table.shape[1] > (int64_t)MOST_REGIONS * CSA_REGION / block_size)
        replay_fault(c, TOOL_BAD_FILE, "in.table", "more than %d regions", (int)MOST_REGIONS);
    v->regions = s->tokens.block_table.shape[1] * block_size / CSA_REGION;
    v->positions = true;
    v->selected = list.data;
    v->columns = list.shape[1];
    v->selected_from = "input";
    place_given_rows(v, positions, active, groups * query_len);
    take_attention(v);
    if (replay_ok(c) && o->topk > 0)
        replay_fault(c, TOOL_USAGE, "--topk", "the case has no scores to select from");
}

/* ---- A recorded context ------------------------------------------------------------------------- */

static int serve_context(inspect_view *v, const inspect_options *o)
{
    serve_options options = {
        .subcommand = "inspect", .backend = o->backend, .block_size = 64, .topk = &v->topk, .topk_count = 1};
    int code = serve_open(&v->server, &v->context, &options);
    /* Later tokens' summaries do not show: a query ranks what it sees. */
    return code == TOOL_OK ? serve_prefill(&v->server, 0, v->context.tokens) : code;
}

/* Scores and selections of all queries. */
static int rank_context(inspect_view *v, judge_row *places, float *scores, int64_t *selected)
{
    int code = TOOL_OK;
    for (int64_t t = 0; t < v->context.queries && code == TOOL_OK; t++) {
        int64_t row = t * v->groups, position = run_context_position(&v->context, t);
        code = serve_score(&v->server, t, v->regions, scores + row * v->regions);
        if (code == TOOL_OK)
            code = serve_decode(&v->server, t, v->topk);
        for (int64_t g = 0; g < v->groups; g++)
            places[row + g] = (judge_row){true, position, 0};
        memcpy(selected + row * v->columns, v->server.selected,
               (size_t)(v->groups * v->columns) * sizeof *selected);
    }
    return code;
}

static int load_context(inspect_view *v, const inspect_options *o)
{
    int code = run_context_open(o->path, v->name, "inspect", &v->context);
    if (code != TOOL_OK)
        return code;
    const run_context *c = &v->context;
    v->groups = c->groups;
    v->rows = c->queries * c->groups;
    v->regions = (c->tokens - 1) / 64 * 8 + 8; /* whole blocks, like the server's */
    v->topk = o->topk > 0 ? o->topk : OTHERWISE_TOPK;
    v->columns = least(v->topk, v->regions) + 1;
    v->positions = true;
    v->heads = c->heads;
    v->exact_query = -1;
    judge_row *places = replay_memory(&v->c, v->rows, sizeof *places);
    csa_tensor scores = replay_output(&v->c, CSA_F32, REPLAY_SHAPE(v->rows, v->regions));
    csa_tensor selected = replay_output(&v->c, CSA_I64, REPLAY_SHAPE(v->rows, v->columns));
    if (!replay_ok(&v->c) || !exact_open(&v->exact, c))
        return tool_fail(TOOL_INTERNAL, "inspect", "no memory for %lld tokens", (long long)c->tokens);
    code = serve_context(v, o);
    if (code == TOOL_OK)
        code = rank_context(v, places, scores.data, selected.data);
    v->places = places;
    v->scores = scores.data;
    v->selected = selected.data;
    v->scores_from = v->selected_from = back_end(v);
    return code;
}

/* ---- Cases -------------------------------------------------------------------------------------- */

typedef void (*loader)(inspect_view *v, const inspect_options *options);

static const struct {
    const char *op;
    loader load; /* NULL: the op `context` */
} ops[] = {
    {"score_decode", load_score_decode}, {"select", load_select},        {"decode_step", load_decode_step},
    {"prefill_step", load_prefill_step}, {"attend_decode", load_attend}, {"context", NULL},
};

enum { OPS = sizeof ops / sizeof ops[0] };

static int find_op(const char *op)
{
    int i = 0;
    while (i < OPS && strcmp(ops[i].op, op) != 0)
        i++;
    return i;
}

bool inspect_knows(const char *op)
{
    return find_op(op) < OPS;
}

int inspect_load(inspect_view *v, replay *run, const inspect_options *o, const capture *file,
                 const capture_case *what)
{
    *v = (inspect_view){.name = what->name, .op = what->op};
    replay_begin(&v->c, run, o->path, file, what);
    loader load = ops[find_op(what->op)].load;
    if (!replay_ok(&v->c))
        return v->c.code;
    if (!load)
        return load_context(v, o);
    load(v, o);
    return v->c.code;
}

void inspect_close(inspect_view *v)
{
    replay_free(&v->c);
    serve_close(&v->server);
    exact_close(&v->exact);
    run_context_close(&v->context);
}
