/*
 * csa run: drafts must not show. The beginning of a generated context is served twice, with drafts and without;
 * the tokens that count are the same, so their outputs, selections, cache rows and summaries have to be.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "run_generated.h"

#include <stdlib.h>
#include <string.h>

enum { PROMPT = 515, TOKENS = 40, TOPK = 16, REQUESTS = 2, NEEDLES = 4 };

/* One way of serving, and what came out for the first TOKENS tokens that counted. */
typedef struct twin {
    engine server;
    uint16_t *out;     /* [requests, TOKENS, G, H, 192] */
    int64_t *selected; /* [requests, TOKENS, G, width + 1] */
} twin;

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static size_t out_values(const twin *t)
{
    return (size_t)(t->server.groups * t->server.heads) * CSA_HEAD_SIZE;
}

static size_t list_values(const twin *t)
{
    return (size_t)(t->server.groups * (t->server.width + 1));
}

static int open_twin(twin *t, const generator *source, const engine_options *options)
{
    int code = engine_open(&t->server, source, options);
    if (code != TOOL_OK)
        return code;
    size_t tokens = (size_t)t->server.requests * TOKENS;
    t->out = calloc(tokens * out_values(t), sizeof *t->out);
    t->selected = calloc(tokens * list_values(t), sizeof *t->selected);
    if (!t->out || !t->selected)
        return tool_fail(TOOL_INTERNAL, "run", "no memory to compare runs with and without drafts");
    return TOOL_OK;
}

static void close_twin(twin *t)
{
    engine_close(&t->server);
    free(t->out);
    free(t->selected);
}

/* Keeps what a step gave for the tokens that count. Returns how many tokens the slowest request has by now. */
static int64_t keep_step(twin *t)
{
    engine *e = &t->server;
    int64_t prompt = e->source->options.prompt, fewest = TOKENS;
    for (int64_t r = 0; r < e->requests; r++) {
        int64_t done = e->length[r] - prompt, accepted = engine_accepted(e, r);
        for (int64_t i = 0; i < accepted && done + i < TOKENS; i++) {
            size_t from = (size_t)(r * e->options.query_len + i), to = (size_t)(r * TOKENS + done + i);
            memcpy(t->out + to * out_values(t), e->out + from * out_values(t), out_values(t) * sizeof *t->out);
            memcpy(t->selected + to * list_values(t), e->selected + from * list_values(t),
                   list_values(t) * sizeof *t->selected);
        }
        fewest = least(fewest, done + accepted);
    }
    return fewest;
}

static int serve_twin(twin *t)
{
    const generate_options *g = &t->server.source->options;
    int64_t total = g->requests * g->prompt, done = 0;
    for (int64_t first = 0; first < total; first += t->server.options.chunk) {
        int code = engine_prefill(&t->server, first, least(t->server.options.chunk, total - first));
        if (code != TOOL_OK)
            return code;
    }
    while (done < TOKENS) {
        int code = engine_decode(&t->server);
        if (code != TOOL_OK)
            return code;
        done = keep_step(t);
        engine_advance(&t->server);
    }
    return TOOL_OK;
}

/* Both have the same block table. */
static bool same_rows(const engine *a, const engine *b, int64_t request, int64_t tokens)
{
    size_t row = CSA_KV_SIZE * (a->options.e4m3 ? sizeof(uint8_t) : sizeof(uint16_t));
    for (int64_t i = 0; i < tokens * a->groups; i++) {
        int64_t slot = engine_slot(a, request, i / a->groups), block = slot / a->block_size;
        int64_t at = (block * a->groups + i % a->groups) * a->block_size + slot % a->block_size;
        if (memcmp((const char *)a->kv + (size_t)at * row, (const char *)b->kv + (size_t)at * row, row) != 0)
            return false;
    }
    return true;
}

static bool same_summaries(const engine *a, const engine *b, int64_t request, int64_t regions)
{
    for (int64_t r = 0; r < regions; r++) {
        int64_t at = engine_slot(a, request, r * CSA_REGION) / CSA_REGION * CSA_SUMMARY_SIZE;
        if (memcmp(a->summaries + at, b->summaries + at, CSA_SUMMARY_SIZE) != 0)
            return false;
    }
    return true;
}

static const char *find_difference(const twin *a, const twin *b)
{
    size_t all = (size_t)a->server.requests * TOKENS;
    int64_t tokens = a->server.source->options.prompt + TOKENS;
    if (memcmp(a->selected, b->selected, all * list_values(a) * sizeof *a->selected) != 0)
        return "selections";
    if (memcmp(a->out, b->out, all * out_values(a) * sizeof *a->out) != 0)
        return "outputs";
    for (int64_t r = 0; r < a->server.requests; r++) {
        if (!same_rows(&a->server, &b->server, r, tokens))
            return "cache rows";
        if (!same_summaries(&a->server, &b->server, r, tokens / CSA_REGION))
            return "summaries";
    }
    return NULL;
}

/* Requests do not advance evenly: room for one whose every draft counts. */
static generate_options short_context(const run_options *o)
{
    int64_t prompt = least(o->prompt, PROMPT);
    return (generate_options){.seed = (uint64_t)o->seed,
                              .requests = least(o->requests, REQUESTS),
                              .prompt = prompt,
                              .tokens = prompt + TOKENS * (o->drafts + 1),
                              .steps = TOKENS,
                              .needles = least(o->needles, least(NEEDLES, prompt / CSA_REGION / 4)),
                              .groups = o->groups,
                              .heads = o->heads,
                              .index_heads = o->index_heads,
                              .plain_mean = o->plain_mean};
}

static int serve_both(const generator *source, const run_options *o, run_twins *twins)
{
    twin with = {0}, without = {0};
    engine_options options = generated_engine(o);
    options.topk = least(options.topk, TOPK);
    options.chunk = least(options.chunk, source->options.requests * source->options.prompt);
    int code = open_twin(&with, source, &options);
    if (code == TOOL_OK)
        code = serve_twin(&with);
    options.query_len = 1;
    if (code == TOOL_OK)
        code = open_twin(&without, source, &options);
    if (code == TOOL_OK)
        code = serve_twin(&without);
    if (code == TOOL_OK)
        *twins = (run_twins){.tokens = TOKENS, .differs = find_difference(&with, &without)};
    close_twin(&with);
    close_twin(&without);
    return code;
}

int run_twins_compare(const run_options *o, run_twins *twins)
{
    generator source = {.passages = 0};
    generate_options options = short_context(o);
    *twins = (run_twins){0};
    if (o->drafts == 0)
        return TOOL_OK;
    int code = generate_open(&source, &options)
                   ? serve_both(&source, o, twins)
                   : tool_fail(TOOL_INTERNAL, "run", "no memory for %d tokens", PROMPT + TOKENS);
    generate_close(&source);
    return code;
}
