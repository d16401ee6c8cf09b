/*
 * Every call of csa.h on one world, valid as they are, for tests that make one thing wrong. Built into the
 * tests that include it. SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TEST_CALLS_H
#define CSA_TEST_CALLS_H

#include "support.h"

typedef struct calls {
    world w; /* w.step and w.cache are what all calls point to */
    csa_plan *plan;
    csa_summarize_args decode, verify, chunk, metadata;
    csa_score_args score;
    csa_select_args select;
    csa_attend_args attend;
    csa_rows rows; /* attend's */
    csa_gate_args gate;
    csa_step_args step;
    csa_layer_args layer;
    csa_tensor runs;         /* metadata's */
    csa_tensor heads, gates; /* csa_gate's, which knows no groups */
} calls;

enum { CALL_LAYER_PLAN = 13, CALLS = CALL_LAYER_PLAN }; /* csa_op, and csa_layer with a plan */

/* Points the calls of a copy to its own world. */
static inline void calls_link(calls *c)
{
    world *w = &c->w;
    w->prepare.tokens = &w->step;
    w->prepare.cache = &w->cache;
    c->decode = c->verify = c->chunk = c->metadata = world_summarize(w);
    c->metadata.metadata = c->runs;
    c->score = world_score(w);
    c->select = world_select(w);
    c->attend = world_attend(w);
    c->rows = w->rows_out;
    c->attend.rows = &c->rows;
    c->step = world_step(w);
    c->layer = world_layer(w);
    c->gate = (csa_gate_args){.size = sizeof c->gate};
    c->gate.attention = c->gate.out = c->heads;
    c->gate.gate = c->gates;
    c->gate.active = tensor_slice(w->rows_out.active, 0, w->tokens);
}

static inline void calls_make(calls *c, const csa_context *context, world_shape shape)
{
    memset(c, 0, sizeof *c);
    world_make(&c->w, shape, 4242);
    world *w = &c->w;
    int requests = w->shape.requests;
    w->step.query_start = arena_tensor(&w->memory, "query_start", NULL, CSA_I32, 1, requests + 1);
    w->step.owners = arena_tensor(&w->memory, "owners", NULL, CSA_I64, 1, (int)w->tokens);
    w->step.seq_lens = arena_tensor(&w->memory, "seq_lens", NULL, CSA_I32, 1, requests);
    for (int64_t q = 0; q <= requests; q++)
        tensor_put(&w->step.query_start, (double)(q * w->shape.query_len), q, 0, 0, 0);
    for (int64_t q = 0; q < requests; q++)
        tensor_put(&w->step.seq_lens, (double)w->lengths[q], q, 0, 0, 0);
    for (int64_t t = 0; t < w->tokens; t++)
        tensor_put(&w->step.owners, (double)(t / w->shape.query_len), t, 0, 0, 0);
    c->runs = arena_tensor(&w->memory, "runs", NULL, CSA_I64, 2, (int)w->tokens, 10);
    int heads = w->shape.groups * w->shape.heads;
    c->heads = arena_tensor(&w->memory, "heads", NULL, CSA_BF16, 3, (int)w->tokens, heads, CSA_HEAD_SIZE);
    c->gates = arena_tensor(&w->memory, "gates", NULL, CSA_BF16, 2, (int)w->tokens, heads);
    csa_plan_args args = {.size = sizeof args,
                          .tokens = w->tokens,
                          .requests = requests,
                          .regions = w->regions,
                          .groups = w->shape.groups,
                          .topk = w->shape.topk};
    CHECK_OK(csa_plan_prefill(context, &args, &c->plan));
    calls_link(c);
    /* What attend reads comes from here. */
    CHECK_OK(csa_score(context, &c->score));
    CHECK_OK(csa_select(context, &c->select));
}

static inline void calls_end(calls *c)
{
    csa_plan_destroy(c->plan);
    world_end(&c->w);
}

static inline const void *calls_args(const calls *c, int call)
{
    const void *all[] = {&c->w.prepare, &c->decode, &c->verify, &c->chunk, &c->metadata, &c->score, &c->select,
                         &c->attend,    &c->gate,   &c->step,   &c->step,  &c->layer,    &c->layer};
    return all[call - 1];
}

static inline const char *calls_name(int call)
{
    static const char *const names[] = {"csa_prepare",
                                        "csa_summarize_decode",
                                        "csa_summarize_verify",
                                        "csa_summarize_prefill",
                                        "csa_summarize_metadata",
                                        "csa_score",
                                        "csa_select",
                                        "csa_attend",
                                        "csa_gate",
                                        "csa_decode",
                                        "csa_prefill",
                                        "csa_layer",
                                        "csa_layer"};
    return names[call - 1];
}

static inline csa_status calls_run(const calls *c, const csa_context *context, int call)
{
    const void *args = calls_args(c, call);
    switch (call) {
    case CSA_OP_PREPARE:
        return csa_prepare(context, args);
    case CSA_OP_SUMMARIZE_DECODE:
        return csa_summarize_decode(context, args);
    case CSA_OP_SUMMARIZE_VERIFY:
        return csa_summarize_verify(context, args);
    case CSA_OP_SUMMARIZE_PREFILL:
        return csa_summarize_prefill(context, args);
    case CSA_OP_SUMMARIZE_METADATA:
        return csa_summarize_metadata(context, args);
    case CSA_OP_SCORE:
        return csa_score(context, args);
    case CSA_OP_SELECT:
        return csa_select(context, args);
    case CSA_OP_ATTEND:
        return csa_attend(context, args);
    case CSA_OP_GATE:
        return csa_gate(context, args);
    case CSA_OP_DECODE:
        return csa_decode(context, args);
    case CSA_OP_PREFILL:
        return csa_prefill(context, c->plan, args);
    case CSA_OP_LAYER:
        return csa_layer(context, NULL, args);
    default:
        return csa_layer(context, c->plan, args);
    }
}

#endif
