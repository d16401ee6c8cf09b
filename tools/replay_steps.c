/*
 * csa replay: whole steps, three ways. Each stage from recorded outputs, judged; the stages one after the
 * other from the inputs; the one call that does it all, which must give the bits of the second way.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "replay_compat.h"
#include "replay_parts.h"

typedef struct step {
    replay_scoring scoring;
    replay_attention attention;
    int64_t topk;
    csa_tensor scores;   /* what the judged selection starts from */
    csa_tensor selected; /* what the judged attention starts from */
} step;

/* Everything but the tokens. */
static void load_step(replay_case *c, step *s)
{
    replay_scoring *g = &s->scoring;
    csa_tensor query = replay_input(c, "index_query", CSA_E4M3,
                                    REPLAY_SHAPE(g->count, g->groups, REPLAY_ANY, CSA_SUMMARY_SIZE));
    csa_tensor weights =
        replay_input(c, "index_weights", CSA_F32, REPLAY_SHAPE(g->count, g->groups, query.shape[2]));
    s->topk = replay_integer(c, "topk", 1, INT32_MAX);
    replay_integer(c, "regions", 1, INT64_MAX); /* in a step, 0 would stand for something else */
    replay_load_scoring(c, g, query, weights);
    g->cache.kv = replay_kv(c, "kv_cache", &g->cache, g->groups);
    replay_load_attention(c, &s->attention, &g->tokens, &g->cache, g->count, g->groups);
}

/* ---- Each stage from recorded outputs ----------------------------------------------------------- */

/* A recorded output to start from, our own where there is none (or it was cut). */
static csa_tensor recorded_or(replay_case *c, const char *name, csa_tensor own)
{
    if (!replay_ok(c) || !replay_recorded(c, name) || capture_corner(c->what, name))
        return own;
    return replay_record(c, name, own.dtype, own.ndim, own.shape);
}

/* Selection from s->scores, judged. */
static csa_tensor select_checked(replay_case *c, const step *s)
{
    csa_tensor current = s->scoring.rows.current;
    csa_tensor selected = replay_select_rows(c, s->scores, current, s->topk);
    replay_check_selected(c, "regions", selected, s->scores, current.data, s->topk);
    return selected;
}

/* ---- The stages in a row, and the composite ----------------------------------------------------- */

/* From the inputs through our own outputs. */
static csa_tensor chain(replay_case *c, step *s)
{
    replay_scoring *g = &s->scoring;
    csa_tensor selected = replay_select_rows(c, g->scores, g->rows.current, s->topk);
    replay_renew_attention(c, &s->attention);
    replay_attend_rows(c, &s->attention, selected, &g->rows);
    return selected;
}

static csa_serving serving_of(const step *s, bool prefill)
{
    const replay_scoring *g = &s->scoring;
    csa_serving serving = {.size = sizeof serving, .regions = g->regions, .topk = (int32_t)s->topk};
    serving.decode_tokens = prefill ? 0 : g->count;
    serving.prefill_tokens = prefill ? g->count : 0;
    serving.groups = (int32_t)g->groups;
    serving.heads = (int32_t)s->attention.query.shape[1];
    serving.index_heads = (int32_t)g->query.shape[2];
    serving.block_size = (int32_t)g->cache.kv.shape[2];
    serving.kv_dtype = g->cache.kv.dtype;
    return serving;
}

static csa_workspace make_workspace(replay_case *c, const step *s, bool prefill)
{
    csa_serving serving = serving_of(s, prefill);
    size_t bytes = 0;
    REPLAY_CALL(c, csa_workspace_size(&c->run->options, &serving, &bytes));
    return (csa_workspace){replay_memory(c, (int64_t)bytes, 1), bytes};
}

/* The composite's arguments, with outputs of its own. */
static csa_step_args step_args(replay_case *c, step *s, csa_rows *rows, csa_tensor selected, bool prefill)
{
    const replay_scoring *g = &s->scoring;
    csa_step_args a = {.size = sizeof a, .tokens = &g->tokens, .cache = &g->cache};
    *rows = replay_row_outputs(c, g->count * g->groups);
    replay_renew_attention(c, &s->attention);
    replay_bind_attention(&s->attention);
    a.index_query = g->query;
    a.index_weights = g->weights;
    a.query = s->attention.args.query;
    a.gate = s->attention.args.gate;
    a.out = s->attention.args.out;
    a.lse = s->attention.args.lse;
    a.scale = s->attention.args.scale;
    a.rows_out = rows;
    a.selected = replay_output(c, CSA_I64, 2, selected.shape);
    a.regions = g->regions;
    a.topk = (int32_t)s->topk;
    a.workspace = make_workspace(c, s, prefill);
    return a;
}

static void call_prefill(replay_case *c, const step *s, const csa_step_args *a)
{
    const replay_scoring *g = &s->scoring;
    csa_plan *plan = NULL;
    csa_plan_args plan_args = {.size = sizeof plan_args,
                               .positions = g->tokens.positions.data,
                               .tokens = g->count,
                               .requests = g->tokens.block_table.shape[0],
                               .regions = g->regions,
                               .groups = (int32_t)g->groups,
                               .topk = (int32_t)s->topk,
                               .invariant = true};
    REPLAY_CALL(c, csa_plan_prefill(c->context, &plan_args, &plan));
    REPLAY_CALL(c, csa_prefill(c->context, plan, a));
    csa_plan_destroy(plan);
}

/* Both of our own ways, which have to agree in every bit. Leaves the first one's selection and attention. */
static csa_tensor compare_ways(replay_case *c, step *s, bool prefill)
{
    csa_tensor selected = chain(c, s);
    replay_attention first = s->attention;
    csa_rows rows;
    csa_step_args a = step_args(c, s, &rows, selected, prefill);
    if (prefill)
        call_prefill(c, s, &a);
    else
        REPLAY_CALL(c, csa_decode(c->context, &a));
    replay_agree(c, "whole step: active", rows.active, s->scoring.rows.active, NULL);
    replay_agree(c, "whole step: positions", rows.positions, s->scoring.rows.positions, NULL);
    replay_agree(c, "whole step: current", rows.current, s->scoring.rows.current, NULL);
    replay_agree(c, "whole step: lengths", rows.lengths, s->scoring.rows.lengths, NULL);
    replay_agree(c, "whole step: topk_lengths", rows.topk_lengths, s->scoring.rows.topk_lengths, NULL);
    replay_agree(c, "whole step: regions", a.selected, selected, NULL);
    replay_agree(c, "whole step: out", s->attention.out, first.out, NULL);
    replay_agree(c, "whole step: lse", s->attention.lse, first.lse, NULL);
    s->attention = first;
    return selected;
}

/* ---- Decode ------------------------------------------------------------------------------------- */

void replay_decode_step(replay_case *c)
{
    step s = {0};
    replay_load_tokens(c, &s.scoring, replay_integer(c, "groups", 1, REPLAY_MOST));
    load_step(c, &s);
    replay_score_rows(c, &s.scoring);
    replay_check_rows(c, &s.scoring, false);
    replay_check_scores(c, "scores", s.scoring.scores, replay_scorer_of(&s.scoring));
    s.scores = recorded_or(c, "scores", s.scoring.scores);
    s.selected = recorded_or(c, "regions", select_checked(c, &s));
    replay_attend_rows(c, &s.attention, s.selected, NULL);
    replay_check_attended(c, "out", s.attention.out, &s.attention, s.selected, s.scoring.places);
    csa_tensor selected = compare_ways(c, &s, false);
    /* A capture to write has to hang together: what the chain gave from our own scores. */
    replay_keep(c, "regions", selected, NULL);
    replay_keep(c, "out", s.attention.out, NULL);
}

/* ---- Prefill ------------------------------------------------------------------------------------ */

/* The reference's packed and paged scores. Where all regions are selected it has none. */
static csa_tensor score_packed(replay_case *c, step *s)
{
    replay_scoring *g = &s->scoring;
    if (g->regions <= s->topk)
        return g->scores;
    replay_packed packed = {.paired = replay_flag(c, "paired", false)};
    replay_score_packed(c, &packed, g, s->topk);
    replay_check_scores(c, "scores", packed.scores, replay_packed_scorer(&packed));
    return packed.scores;
}

static void attend_forms(replay_case *c, step *s)
{
    replay_attend_rows(c, &s->attention, s->selected, NULL);
    replay_judge_attended(c, "out in place", s->attention.out, &s->attention, s->selected, s->scoring.places);
    replay_attend_pages(c, &s->scoring, &s->attention, s->selected);
    replay_attend_gathered(c, &s->scoring, &s->attention, s->selected);
}

/* A capture to write has to hang together: what our own scores lead to. */
static void keep_own(replay_case *c, step *s, csa_tensor scores)
{
    if (!c->run->write)
        return;
    c->keep_only = true;
    s->scores = scores;
    s->selected = select_checked(c, s);
    attend_forms(c, s);
    c->keep_only = false;
}

void replay_prefill_step(replay_case *c)
{
    step s = {0};
    replay_load_prefill(c, &s.scoring);
    load_step(c, &s);
    replay_score_rows(c, &s.scoring);
    replay_judge_scores(c, "scores in place", s.scoring.scores, replay_scorer_of(&s.scoring));
    csa_tensor own = score_packed(c, &s);
    s.scores = recorded_or(c, "scores", own);
    s.selected = recorded_or(c, "regions", select_checked(c, &s));
    attend_forms(c, &s);
    compare_ways(c, &s, true);
    keep_own(c, &s, own);
}
