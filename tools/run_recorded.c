/*
 * csa run: a recorded context.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "heatmap.h"
#include "run.h"
#include "run_serve.h"

#include <inttypes.h>
#include <jansson.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What is known of one topk. */
typedef struct topk_result {
    int64_t topk;
    double share;            /* sum over rows and heads */
    deviation dense, sparse; /* of the library's output, to dense attention and to that over the same regions */
    double *seconds;         /* of each step's csa_decode */
    bool bad_list;
} topk_result;

typedef struct run {
    run_options options; /* with topk filled in */
    run_context source;
    serve server;
    exact_attention exact;
    dense_partial *scratch;
    float *dense_out;
    double *times; /* what all `seconds` lie in */
    double *dense_seconds, *summarize_seconds, prefill_seconds;
    deviation recorded, dense; /* of exact attention to the recorded one, of dense attention to the exact one */
    topk_result results[TOOL_LIST_MAX];
    heatmap map; /* with --svg: of the first topk */
    double *mass;
    run_verdict verdict;
} run;

/* ---- The run ------------------------------------------------------------------------------------ */

static int prepare(run *r)
{
    const run_options *o = &r->options;
    serve_options options = {.subcommand = "run",
                             .backend = o->backend,
                             .tier = o->tier,
                             .threads = (int32_t)o->threads,
                             .block_size = o->block_size,
                             .topk = o->topk.items,
                             .topk_count = o->topk.count,
                             .plain_mean = o->plain_mean};
    int code = serve_open(&r->server, &r->source, &options);
    if (code != TOOL_OK)
        return code;
    omp_set_num_threads(csa_context_threads(r->server.context));
    dense_step step = serve_dense_step(&r->server, 0);
    size_t queries = (size_t)r->source.queries;
    r->scratch = calloc(dense_scratch(&step), sizeof *r->scratch);
    r->dense_out = calloc((size_t)(step.groups * step.heads), CSA_HEAD_SIZE * sizeof *r->dense_out);
    r->times = calloc((size_t)o->topk.count + 2, queries * sizeof *r->times);
    if (!r->scratch || !r->dense_out || !r->times || !exact_open(&r->exact, &r->source))
        return tool_fail(TOOL_INTERNAL, "run", "no memory for %" PRId64 " tokens", r->source.tokens);
    int64_t regions = (r->source.tokens - 1) / CSA_REGION + 1;
    r->mass = calloc((size_t)regions, sizeof *r->mass);
    if (!r->mass || (o->svg && !heatmap_open(&r->map, r->source.queries, regions)))
        return tool_fail(TOOL_INTERNAL, "run", "no memory for a picture");
    r->dense_seconds = r->times;
    r->summarize_seconds = r->times + queries;
    for (int64_t i = 0; i < o->topk.count; i++) {
        r->results[i].topk = o->topk.items[i];
        r->results[i].seconds = r->times + (size_t)(i + 2) * queries;
    }
    return TOOL_OK;
}

static int prefill(run *r)
{
    int64_t end = run_context_position(&r->source, 0), count;
    double start = tool_seconds();
    for (int64_t first = 0; first < end; first += count) {
        count = end - first < r->options.chunk ? end - first : r->options.chunk;
        int code = serve_prefill(&r->server, first, count);
        if (code != TOOL_OK)
            return code;
        tool_progress("prefill", first + count, end);
    }
    r->prefill_seconds = tool_seconds() - start;
    return TOOL_OK;
}

/* Compares what the last decode step put out. */
static void judge_decode(run *r, int64_t query, topk_result *result)
{
    const run_context *c = &r->source;
    double got[CSA_HEAD_SIZE], want[CSA_HEAD_SIZE];
    int64_t width = r->server.selected_width;
    for (int64_t head = 0; head < c->groups * c->heads; head++) {
        quality_widen(r->server.out + head * CSA_HEAD_SIZE, c->head_size, got);
        deviation_add(&result->dense, got, r->exact.out + head * c->head_size, c->head_size);
        const int64_t *list = r->server.selected + head / c->heads * width;
        double share = exact_sparse(&r->exact, query, head, list, width, want);
        if (share < 0) {
            result->bad_list = true;
            continue;
        }
        result->share += share;
        deviation_add(&result->sparse, got, want, c->head_size);
    }
}

/* The first topk's selections, and dense attention's mass, the mean of a group's heads. */
static void add_to_map(run *r, int64_t query)
{
    const run_context *c = &r->source;
    int64_t width = r->server.selected_width, position = run_context_position(c, query);
    int64_t current = position / CSA_REGION;
    for (int64_t group = 0; group < c->groups; group++) {
        memset(r->mass, 0, (size_t)(current + 1) * sizeof *r->mass);
        for (int64_t i = 0; i < c->heads; i++)
            exact_add_mass(&r->exact, query, group * c->heads + i, r->mass);
        for (int64_t region = 0; region <= current; region++)
            r->mass[region] /= (double)c->heads;
        heatmap_add(&r->map, query, position, current, r->server.selected + group * width, width);
        heatmap_add_mass(&r->map, query, current, r->mass);
    }
}

static void judge_dense(run *r, int64_t query)
{
    const run_context *c = &r->source;
    int64_t rows = c->groups * c->heads, size = c->head_size;
    double got[CSA_HEAD_SIZE];
    for (int64_t head = 0; head < rows; head++) {
        const double *exact = r->exact.out + head * size;
        for (int64_t i = 0; i < size; i++)
            got[i] = (double)r->dense_out[head * CSA_HEAD_SIZE + i];
        deviation_add(&r->dense, got, exact, size);
        for (int64_t i = 0; c->dense && i < size; i++)
            got[i] = (double)c->dense[(query * rows + head) * size + i];
        if (c->dense)
            deviation_add(&r->recorded, got, exact, size);
    }
}

static void run_dense(run *r, int64_t query)
{
    dense_step step = serve_dense_step(&r->server, query);
    const uint16_t *q = r->server.query + query * step.groups * step.heads * CSA_HEAD_SIZE;
    double start = tool_seconds();
    dense_decode(&step, q, r->scratch, r->dense_out);
    r->dense_seconds[query] = tool_seconds() - start;
    judge_dense(r, query);
}

static int run_step(run *r, int64_t query)
{
    double start = tool_seconds();
    int code = serve_summarize(&r->server, query);
    r->summarize_seconds[query] = tool_seconds() - start;
    exact_dense(&r->exact, query);
    for (int64_t i = 0; i < r->options.topk.count && code == TOOL_OK; i++) {
        topk_result *result = &r->results[i];
        start = tool_seconds();
        code = serve_decode(&r->server, query, result->topk);
        result->seconds[query] = tool_seconds() - start;
        if (code == TOOL_OK)
            judge_decode(r, query, result);
        if (code == TOOL_OK && i == 0 && r->options.svg)
            add_to_map(r, query);
    }
    run_dense(r, query);
    return code;
}

static int decode(run *r)
{
    int code = TOOL_OK;
    for (int64_t t = 0; t < r->source.queries && code == TOOL_OK; t++) {
        code = run_step(r, t);
        tool_progress("decode ", t + 1, r->source.queries);
    }
    return code;
}

/* ---- The verdict -------------------------------------------------------------------------------- */

static void judge(run *r)
{
    run_verdict *v = &r->verdict;
    double recorded = deviation_overall(&r->recorded);
    /* Written so that NaN fails. */
    if (!(recorded <= run_limits.recorded))
        run_fail(v, "dense attention is %.2g from the recorded one; rounding explains %g", recorded,
                 run_limits.recorded);
    run_judge_dense(v, &r->dense);
    for (int64_t i = 0; i < r->options.topk.count; i++) {
        const topk_result *t = &r->results[i];
        char what[32];
        snprintf(what, sizeof what, "topk %" PRId64, t->topk);
        run_judge_sparse(v, what, &t->sparse, &t->dense, t->bad_list);
    }
    if (!v->failed)
        snprintf(v->text, sizeof v->text, "attention is exact within rounding over what was selected%s",
                 r->source.dense ? ", dense attention is the recorded one"
                                 : "; no dense attention was recorded");
}

/* ---- Output ------------------------------------------------------------------------------------- */

static double pairs(const run *r)
{
    return (double)(r->source.queries * r->source.groups * r->source.heads);
}

static void print_setting(const run *r)
{
    const run_context *c = &r->source;
    const run_options *o = &r->options;
    const serve *s = &r->server;
    printf("context   %s: %" PRId64 " tokens, %" PRId64 " queries, %" PRId64 " groups of %" PRId64
           " heads, %" PRId64 " wide, %" PRId64 " index heads\n",
           c->name, c->tokens, c->queries, c->groups, c->heads, c->head_size, c->index_heads);
    if (c->source[0])
        printf("source    %s\n", c->source);
    printf("back end  %s, %" PRId32 " threads, blocks of %" PRId64 ", prefill in chunks of %" PRId64 ", %s\n",
           csa_backend_name(csa_context_backend(s->context)), csa_context_threads(s->context), o->block_size,
           o->chunk, o->plain_mean ? "summaries: plain means" : "summaries: softmax of z");
    printf("memory    KV %.1f MiB, summaries %.1f KiB, ring %.1f KiB, workspace %.1f KiB\n",
           (double)run_tensor_bytes(&s->cache.kv) / 1048576,
           (double)run_tensor_bytes(&s->cache.summaries) / 1024,
           (double)run_tensor_bytes(&s->cache.ring) / 1024, (double)s->workspace.bytes / 1024);
}

static void print_text(run *r)
{
    int64_t queries = r->source.queries;
    double dense = run_median(r->dense_seconds, queries), summarize = run_median(r->summarize_seconds, queries);
    print_setting(r);
    printf("prefill   %" PRId64 " tokens summarised in %.2f ms\n", r->source.tokens - queries,
           r->prefill_seconds * 1e3);
    printf("steps     %" PRId64 ": summarize %.1f us, dense attention %.1f us", queries, summarize * 1e6,
           dense * 1e6);
    if (r->source.dense)
        printf(", %.1e from the recorded one", deviation_overall(&r->recorded));
    printf("\n\n%6s %11s %10s %10s %11s %10s %10s %12s\n", "topk", "share kept", "error", "mean head",
           "worst head", "rounding", "us a step", "dense / CSA");
    for (int64_t i = 0; i < r->options.topk.count; i++) {
        topk_result *t = &r->results[i];
        double step = run_median(t->seconds, queries) + summarize;
        printf("%6" PRId64 " %11.3f %10.3f %10.3f %11.3f %10.1e %10.1f %12.2f\n", t->topk, t->share / pairs(r),
               deviation_overall(&t->dense), deviation_mean(&t->dense), t->dense.worst,
               deviation_overall(&t->sparse), step * 1e6, dense / step);
    }
    printf("\n%s: %s\n", r->verdict.failed ? "FAILED" : "ok", r->verdict.text);
}

static json_t *topk_json(const run *r, topk_result *t, double dense, double summarize)
{
    double step = run_median(t->seconds, r->source.queries) + summarize;
    return json_pack("{s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "topk", (json_int_t)t->topk, "share_kept",
                     run_real(t->share / pairs(r)), "error", run_real(deviation_overall(&t->dense)),
                     "error_mean_head", run_real(deviation_mean(&t->dense)), "error_worst_head",
                     run_real(t->dense.worst), "rounding", run_real(deviation_overall(&t->sparse)),
                     "step_seconds", run_real(step), "dense_ratio", run_real(dense / step));
}

/* A path that is not UTF-8 becomes null. */
static json_t *context_json(const run *r)
{
    const run_context *c = &r->source;
    return json_pack("{s:o?, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:f}", "file",
                     json_string(r->options.path), "case", c->name, "source", c->source, "tokens",
                     (json_int_t)c->tokens, "queries", (json_int_t)c->queries, "groups", (json_int_t)c->groups,
                     "heads", (json_int_t)c->heads, "head_size", (json_int_t)c->head_size, "index_heads",
                     (json_int_t)c->index_heads, "scale", (double)c->scale);
}

static json_t *memory_json(const serve *s)
{
    return json_pack("{s:I, s:I, s:I, s:I}", "kv", (json_int_t)run_tensor_bytes(&s->cache.kv), "summaries",
                     (json_int_t)run_tensor_bytes(&s->cache.summaries), "ring",
                     (json_int_t)run_tensor_bytes(&s->cache.ring), "workspace", (json_int_t)s->workspace.bytes);
}

static int print_json(run *r)
{
    const run_options *o = &r->options;
    const serve *s = &r->server;
    int64_t queries = r->source.queries;
    double dense = run_median(r->dense_seconds, queries), summarize = run_median(r->summarize_seconds, queries);
    json_t *results = json_array();
    for (int64_t i = 0; i < o->topk.count; i++)
        json_array_append_new(results, topk_json(r, &r->results[i], dense, summarize));
    json_t *root = json_pack(
        "{s:o, s:s, s:i, s:I, s:I, s:b, s:o, s:o, s:o, s:o, s:o, s:o, s:b, s:s}", "context", context_json(r),
        "backend", csa_backend_name(csa_context_backend(s->context)), "threads",
        csa_context_threads(s->context), "block_size", (json_int_t)o->block_size, "chunk", (json_int_t)o->chunk,
        "plain_mean", o->plain_mean, "memory", memory_json(s), "prefill_seconds", run_real(r->prefill_seconds),
        "summarize_seconds", run_real(summarize), "dense_seconds", run_real(dense), "dense_to_recorded",
        r->source.dense ? run_real(deviation_overall(&r->recorded)) : json_null(), "results", results, "ok",
        !r->verdict.failed, "verdict", r->verdict.text);
    return tool_print_json("run", root);
}

static int draw(run *r)
{
    heatmap *h = &r->map;
    snprintf(h->title, sizeof h->title, "%.60s: what its last %" PRId64 " tokens select", r->source.name,
             r->source.queries);
    snprintf(h->subtitle, sizeof h->subtitle,
             "%" PRId64 " tokens, topk %" PRId64 ", mean over %" PRId64 " groups of %" PRId64 " heads. %.80s",
             r->source.tokens, r->options.topk.items[0], r->source.groups, r->source.heads, r->source.source);
    h->row_name = "position of the query";
    h->selected_name = "selected regions, share of the groups";
    return heatmap_write(h, "run", r->options.svg);
}

static int serve_and_judge(run *r)
{
    int code = prepare(r);
    if (code == TOOL_OK)
        code = prefill(r);
    if (code == TOOL_OK)
        code = decode(r);
    if (code == TOOL_OK && r->options.svg)
        code = draw(r);
    if (code != TOOL_OK)
        return code;
    judge(r);
    if (r->options.json)
        code = print_json(r);
    else
        print_text(r);
    if (code != TOOL_OK)
        return code;
    return r->verdict.failed ? TOOL_CHECK_FAILED : TOOL_OK;
}

int run_recorded(const run_options *options)
{
    run r = {.options = *options};
    if (r.options.topk.count == 0)
        r.options.topk = (tool_list){.items = {16, 32, 64, 128}, .count = 4};
    int code = run_context_open(r.options.path, NULL, "run", &r.source);
    if (code != TOOL_OK)
        return code;
    code = serve_and_judge(&r);
    serve_close(&r.server);
    exact_close(&r.exact);
    heatmap_close(&r.map);
    free(r.mass);
    free(r.scratch);
    free(r.dense_out);
    free(r.times);
    run_context_close(&r.source);
    return code;
}
