/*
 * csa run: a recorded context served through the library, and what that costs in quality and time.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "options.h"
#include "quality.h"
#include "run_serve.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <omp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "usage: csa run --context FILE [options]\n"
    "\n"
    "Serves a recorded context as an engine would: keys and values in a paged cache with a shuffled block "
    "table,\n"
    "summaries made by prefill in chunks that end anywhere, then one decode step for each recorded query. "
    "Prints,\n"
    "for each topk, the share of dense attention's softmax mass that the selected regions hold (mean over rows "
    "and\n"
    "heads), the error against dense attention as relative norm (over all, mean and worst of a row's heads), "
    "and\n"
    "the time of a step (median) beside dense attention's on the same threads. Heads narrower than 192 are "
    "padded.\n"
    "Fails (exit 1) if attention over the selected regions is not what it should be, if dense attention is "
    "not\n"
    "what the file recorded, or if anything is not finite.\n"
    "\n"
    "  --context FILE    a capture (safetensors) with a case of the op `context`\n"
    "  --topk N[,N...]   historical regions a row attends to, 1 to 1024 (16,32,64,128)\n"
    "  --backend B       ref, cpu or default (default)\n"
    "  --threads N       threads of the library and of dense attention (as many as OpenMP would use)\n"
    "  --block-size N    tokens of a cache block: 16, 32, 64 or 128 (64)\n"
    "  --chunk N         tokens of a prefill step (509)\n"
    "  --plain-mean      z = 0: a summary is the mean of its region's index keys\n"
    "  --json            the figures as JSON\n"
    "\n"
    "examples:\n"
    "  csa run --context captures/smollm2.safetensors\n"
    "  csa run --context captures/smollm2.safetensors --topk 64 --plain-mean\n"
    "  csa run --context captures/smollm2.safetensors --backend ref --threads 1 --json\n";

/* Relative norms that rounding explains. */
static const double recorded_bound = 1e-6;    /* our dense attention and the file's, which is rounded to fp32 */
static const double dense_bound = 1e-5;       /* dense attention in fp32 and in double */
static const double sparse_bound = 4e-3;      /* the library's attention and the exact one, in bf16 */
static const double sparse_head_bound = 8e-3; /* the same for the worst head of a row */

typedef struct run_options {
    const char *path;
    tool_list topk;
    csa_backend backend;
    int64_t threads, block_size, chunk;
    bool plain_mean, json;
} run_options;

/* What is known of one topk. */
typedef struct topk_result {
    int64_t topk;
    double share;            /* sum over rows and heads */
    deviation dense, sparse; /* of the library's output, to dense attention and to that over the same regions */
    double *seconds;         /* of each step's csa_decode */
    bool bad_list;
} topk_result;

typedef struct run {
    run_options options;
    run_context source;
    serve server;
    exact_attention exact;
    dense_partial *scratch;
    float *dense_out;
    double *times; /* what all `seconds` lie in */
    double *dense_seconds, *summarize_seconds, prefill_seconds;
    deviation recorded, dense; /* of exact attention to the recorded one, of dense attention to the exact one */
    topk_result results[TOOL_LIST_MAX];
    char verdict[160];
    bool failed;
} run;

/* ---- Arguments ---- */

static int check_options(const run_options *o)
{
    int64_t block = o->block_size;
    if (!o->path)
        return tool_fail(TOOL_USAGE, "run",
                         "needs --context FILE, a capture with a recorded context such as smollm2.safetensors; "
                         "`csa run --help` says more");
    if (block != 16 && block != 32 && block != 64 && block != 128)
        return tool_fail(TOOL_USAGE, "run", "--block-size takes 16, 32, 64 or 128, not %" PRId64, block);
    return TOOL_OK;
}

static bool parse(int argc, char **argv, run_options *o, int *code)
{
    const tool_option table[] = {
        {"--context", OPTION_TEXT, &o->path, 0, 0},
        {"--topk", OPTION_LIST, &o->topk, 1, CSA_MAX_TOPK},
        {"--backend", OPTION_BACKEND, &o->backend, 0, 0},
        {"--threads", OPTION_NUMBER, &o->threads, 1, 1024},
        {"--block-size", OPTION_NUMBER, &o->block_size, 1, INT32_MAX},
        {"--chunk", OPTION_NUMBER, &o->chunk, 1, INT32_MAX},
        {"--plain-mean", OPTION_FLAG, &o->plain_mean, 0, 0},
        {"--json", OPTION_FLAG, &o->json, 0, 0},
    };
    if (!tool_options(argc, argv, table, sizeof table / sizeof *table, help, code))
        return false;
    *code = check_options(o);
    return *code == TOOL_OK;
}

/* ---- The run ---- */

static int prepare(run *r)
{
    const run_options *o = &r->options;
    serve_options options = {.backend = o->backend,
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

/* ---- The verdict ---- */

/* The first failure is the verdict. */
__attribute__((format(printf, 2, 3))) static void fail(run *r, const char *format, ...)
{
    va_list arguments;
    if (r->failed)
        return;
    va_start(arguments, format);
    vsnprintf(r->verdict, sizeof r->verdict, format, arguments);
    va_end(arguments);
    r->failed = true;
}

static void judge(run *r)
{
    double recorded = deviation_overall(&r->recorded), dense = deviation_overall(&r->dense);
    /* Written so that NaN fails. */
    if (!(recorded <= recorded_bound))
        fail(r, "dense attention is %.2g from the recorded one; rounding explains %g", recorded,
             recorded_bound);
    if (!(dense <= dense_bound))
        fail(r, "dense attention in fp32 is %.2g from that in double; rounding explains %g", dense,
             dense_bound);
    for (int64_t i = 0; i < r->options.topk.count; i++) {
        const topk_result *t = &r->results[i];
        double overall = deviation_overall(&t->sparse);
        if (t->bad_list)
            fail(r, "topk %" PRId64 ": a selection is not ascending, or lies past its row", t->topk);
        if (!isfinite(deviation_overall(&t->dense)) || !isfinite(t->share))
            fail(r, "topk %" PRId64 ": the output is not finite", t->topk);
        if (!(overall <= sparse_bound) || !(t->sparse.worst <= sparse_head_bound))
            fail(r, "topk %" PRId64 ": attention is %.2g (worst head %.2g) from exact; %g (%g) is allowed",
                 t->topk, overall, t->sparse.worst, sparse_bound, sparse_head_bound);
    }
    if (!r->failed)
        snprintf(r->verdict, sizeof r->verdict, "attention is exact within rounding over what was selected%s",
                 r->source.dense ? ", dense attention is the recorded one"
                                 : "; no dense attention was recorded");
}

/* ---- Output ---- */

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts. */
static double median(double *values, int64_t count)
{
    qsort(values, (size_t)count, sizeof *values, compare_doubles);
    return (values[(count - 1) / 2] + values[count / 2]) / 2;
}

static double pairs(const run *r)
{
    return (double)(r->source.queries * r->source.groups * r->source.heads);
}

static size_t tensor_bytes(const csa_tensor *t)
{
    size_t bytes = t->dtype >> 8 & 0xFF ? (t->dtype >> 8 & 0xFF) / 8 : 0;
    for (int32_t i = 0; i < t->ndim; i++)
        bytes *= (size_t)t->shape[i];
    return bytes;
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
           (double)tensor_bytes(&s->cache.kv) / 1048576, (double)tensor_bytes(&s->cache.summaries) / 1024,
           (double)tensor_bytes(&s->cache.ring) / 1024, (double)s->workspace.bytes / 1024);
}

static void print_text(run *r)
{
    int64_t queries = r->source.queries;
    double dense = median(r->dense_seconds, queries), summarize = median(r->summarize_seconds, queries);
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
        double step = median(t->seconds, queries) + summarize;
        printf("%6" PRId64 " %11.3f %10.3f %10.3f %11.3f %10.1e %10.1f %12.2f\n", t->topk, t->share / pairs(r),
               deviation_overall(&t->dense), deviation_mean(&t->dense), t->dense.worst,
               deviation_overall(&t->sparse), step * 1e6, dense / step);
    }
    printf("\n%s: %s\n", r->failed ? "FAILED" : "ok", r->verdict);
}

/* JSON has no NaN and no infinity: null. */
static json_t *real(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static json_t *topk_json(const run *r, topk_result *t, double dense, double summarize)
{
    double step = median(t->seconds, r->source.queries) + summarize;
    return json_pack("{s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "topk", (json_int_t)t->topk, "share_kept",
                     real(t->share / pairs(r)), "error", real(deviation_overall(&t->dense)), "error_mean_head",
                     real(deviation_mean(&t->dense)), "error_worst_head", real(t->dense.worst), "rounding",
                     real(deviation_overall(&t->sparse)), "step_seconds", real(step), "dense_ratio",
                     real(dense / step));
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
    return json_pack("{s:I, s:I, s:I, s:I}", "kv", (json_int_t)tensor_bytes(&s->cache.kv), "summaries",
                     (json_int_t)tensor_bytes(&s->cache.summaries), "ring",
                     (json_int_t)tensor_bytes(&s->cache.ring), "workspace", (json_int_t)s->workspace.bytes);
}

static int print_json(run *r)
{
    const run_options *o = &r->options;
    const serve *s = &r->server;
    int64_t queries = r->source.queries;
    double dense = median(r->dense_seconds, queries), summarize = median(r->summarize_seconds, queries);
    json_t *results = json_array();
    for (int64_t i = 0; i < o->topk.count; i++)
        json_array_append_new(results, topk_json(r, &r->results[i], dense, summarize));
    json_t *root = json_pack(
        "{s:o, s:s, s:i, s:I, s:I, s:b, s:o, s:o, s:o, s:o, s:o, s:o, s:b, s:s}", "context", context_json(r),
        "backend", csa_backend_name(csa_context_backend(s->context)), "threads",
        csa_context_threads(s->context), "block_size", (json_int_t)o->block_size, "chunk", (json_int_t)o->chunk,
        "plain_mean", o->plain_mean, "memory", memory_json(s), "prefill_seconds", real(r->prefill_seconds),
        "summarize_seconds", real(summarize), "dense_seconds", real(dense), "dense_to_recorded",
        r->source.dense ? real(deviation_overall(&r->recorded)) : json_null(), "results", results, "ok",
        !r->failed, "verdict", r->verdict);
    return tool_print_json("run", root);
}

static int serve_and_judge(run *r)
{
    int code = prepare(r);
    if (code == TOOL_OK)
        code = prefill(r);
    if (code == TOOL_OK)
        code = decode(r);
    if (code != TOOL_OK)
        return code;
    judge(r);
    if (r->options.json)
        code = print_json(r);
    else
        print_text(r);
    if (code != TOOL_OK)
        return code;
    return r->failed ? TOOL_CHECK_FAILED : TOOL_OK;
}

int tool_run(int argc, char **argv)
{
    run r = {.options = {
                 .topk = {.items = {16, 32, 64, 128}, .count = 4},
                 .block_size = 64,
                 .chunk = 509, /* a prime: most chunks end within a region */
             }};
    int code;
    if (!parse(argc, argv, &r.options, &code))
        return code;
    code = run_context_open(r.options.path, &r.source);
    if (code != TOOL_OK)
        return code;
    code = serve_and_judge(&r);
    serve_close(&r.server);
    exact_close(&r.exact);
    free(r.scratch);
    free(r.dense_out);
    free(r.times);
    run_context_close(&r.source);
    return code;
}
