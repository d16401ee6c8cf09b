/*
 * csa run: the figures of a generated context.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "run_generated.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <sys/resource.h>

/* What is printed and follows from what was measured. */
typedef struct figures {
    double median, p90;  /* of a step */
    double again;        /* of a step: csa_decode alone */
    double dense, plain; /* of a step: dense attention by the library's kernels, and by plain loops */
    double prefill_rate, decode_rate;
    double share, lowest_share;
    int64_t peak_bytes; /* resident, of the whole process */
    int64_t tokens;     /* all that were decoded, drafts included */
} figures;

static int64_t peak_bytes(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_SELF, &usage) == 0 ? (int64_t)usage.ru_maxrss * 1024 : 0;
}

static figures gather(generated *g)
{
    const run_options *o = &g->options;
    int64_t step_tokens = o->requests * (o->drafts + 1);
    figures f = {.median = run_median(g->step_seconds, o->steps),
                 .p90 = run_quantile(g->step_seconds, o->steps, 0.9),
                 .again = run_median(g->again_seconds, g->samples),
                 .dense = run_median(g->dense_seconds, g->samples),
                 .plain = run_median(g->plain_seconds, g->samples) * (double)step_tokens,
                 .prefill_rate = (double)(o->requests * o->prompt) / g->prefill_seconds,
                 .decode_rate = (double)g->accepted / g->decode_seconds,
                 .share = g->decode.share / (double)g->decode.sparse.pairs,
                 .lowest_share = g->decode.lowest_share,
                 .peak_bytes = peak_bytes(),
                 .tokens = o->steps * step_tokens};
    return f;
}

/* ---- Text --------------------------------------------------------------------------------------- */

static void print_setting(const generated *g, const figures *f)
{
    const run_options *o = &g->options;
    const engine *e = &g->server;
    printf("context   generated, seed %" PRId64 ": %" PRId64 " requests of %" PRId64 " tokens, %" PRId64
           " passages about %d topics, %" PRId64 " needles each\n",
           o->seed, o->requests, o->prompt, g->source.passages, GENERATE_TOPICS, o->needles);
    printf("layer     KV groups %" PRId64 ", heads %" PRId64 ", index heads %" PRId64 " each; topk %" PRId64
           " of %" PRId64 " regions, KV %s, summaries: %s\n",
           o->groups, o->heads, o->index_heads, o->topk.items[0], o->prompt / CSA_REGION, o->kv,
           o->plain_mean ? "plain means" : "softmax of z");
    printf("back end  %s (tier %s), %" PRId32 " threads, blocks of %" PRId64 ", prefill in chunks of %" PRId64
           "\n",
           csa_backend_name(csa_context_backend(e->context)), csa_context_tier(e->context),
           csa_context_threads(e->context), o->block_size, e->options.chunk);
    printf("memory    KV %.1f MiB, summaries %.1f KiB, ring %.1f KiB, workspace %.1f KiB; peak of the process "
           "%.1f "
           "MiB\n",
           (double)run_tensor_bytes(&e->cache.kv) / 1048576,
           (double)run_tensor_bytes(&e->cache.summaries) / 1024,
           (double)run_tensor_bytes(&e->cache.ring) / 1024, (double)e->workspace.bytes / 1024,
           (double)f->peak_bytes / 1048576);
}

static void print_speed(const generated *g, const figures *f)
{
    const run_options *o = &g->options;
    printf("prefill   %" PRId64 " tokens in %.2f s, %.0f tokens a second\n", o->requests * o->prompt,
           g->prefill_seconds, f->prefill_rate);
    printf("decode    %" PRId64 " steps of %" PRId64 " x %" PRId64
           " tokens: median %.2f ms, p90 %.2f ms; %" PRId64 " of %" PRId64 " tokens count, %.0f a second\n",
           o->steps, o->requests, o->drafts + 1, f->median * 1e3, f->p90 * 1e3, g->accepted, f->tokens,
           f->decode_rate);
}

static double ratio(uint64_t a, uint64_t b)
{
    return b > 0 ? (double)a / (double)b : 0;
}

static uint64_t moved(const cost *c)
{
    return cost_add(c->read, c->written);
}

static void print_dense(const generated *g, const figures *f)
{
    const cost *sparse = &g->step_cost.sparse, *dense = &g->step_cost.dense;
    printf("dense     a step's attention takes %.2f ms, dense %.2f ms by the same kernels, %.1f times as long; "
           "%.2f ms "
           "by plain loops (%" PRId64 " steps)\n",
           f->again * 1e3, f->dense * 1e3, f->dense / f->again, f->plain * 1e3, g->samples);
    printf("          by arithmetic, a step: %.2f MB and %.3f Gop, dense %.2f MB and %.3f Gop: %.1f and %.1f "
           "times\n",
           (double)moved(sparse) / 1e6, (double)sparse->operations / 1e9, (double)moved(dense) / 1e6,
           (double)dense->operations / 1e9, ratio(moved(dense), moved(sparse)),
           ratio(dense->operations, sparse->operations));
    printf("          the whole prefill: %.3f Top, dense %.3f Top: %.1f times\n",
           (double)g->prefill_cost.sparse.operations / 1e12, (double)g->prefill_cost.dense.operations / 1e12,
           ratio(g->prefill_cost.dense.operations, g->prefill_cost.sparse.operations));
}

static void print_quality(const generated *g, const figures *f)
{
    printf(
        "quality   share kept %.3f (lowest head %.3f), error against dense %.3f, rounding %.1e (prefill %.1e); "
        "%" PRId64 " rows and heads\n",
        f->share, f->lowest_share, deviation_overall(&g->decode.dense), deviation_overall(&g->decode.sparse),
        deviation_overall(&g->prefill.sparse), g->decode.sparse.pairs);
    if (g->options.needles > 0)
        printf("needles   %" PRId64 " of %" PRId64
               " found by the queries that ask for them; outputs are their values "
               "to a cosine of %.3f or better\n",
               g->found, g->asked, g->lowest_answer);
    if (g->twins.tokens > 0)
        printf("drafts    %" PRId64 " tokens of a shorter prompt with drafts and without: %s\n",
               g->twins.tokens,
               g->twins.differs ? "they differ" : "the same bits in outputs, selections, cache and summaries");
}

static void print_text(const generated *g, const figures *f)
{
    print_setting(g, f);
    print_speed(g, f);
    print_quality(g, f);
    print_dense(g, f);
    printf("\n%s: %s\n", g->verdict.failed ? "FAILED" : "ok", g->verdict.text);
}

/* ---- JSON --------------------------------------------------------------------------------------- */

static json_t *context_json(const generated *g)
{
    const run_options *o = &g->options;
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s}", "seed", (json_int_t)o->seed,
                     "requests", (json_int_t)o->requests, "prompt", (json_int_t)o->prompt, "passages",
                     (json_int_t)g->source.passages, "steps", (json_int_t)o->steps, "drafts",
                     (json_int_t)o->drafts, "groups", (json_int_t)o->groups, "heads", (json_int_t)o->heads,
                     "index_heads", (json_int_t)o->index_heads, "topk", (json_int_t)o->topk.items[0], "kv",
                     o->kv);
}

static json_t *memory_json(const generated *g, const figures *f)
{
    const engine *e = &g->server;
    return json_pack("{s:I, s:I, s:I, s:I, s:I}", "kv", (json_int_t)run_tensor_bytes(&e->cache.kv), "summaries",
                     (json_int_t)run_tensor_bytes(&e->cache.summaries), "ring",
                     (json_int_t)run_tensor_bytes(&e->cache.ring), "workspace", (json_int_t)e->workspace.bytes,
                     "peak", (json_int_t)f->peak_bytes);
}

static json_t *prefill_json(const generated *g, const figures *f)
{
    return json_pack("{s:I, s:o, s:o, s:o}", "tokens", (json_int_t)(g->options.requests * g->options.prompt),
                     "seconds", run_real(g->prefill_seconds), "tokens_per_second", run_real(f->prefill_rate),
                     "rounding", run_real(deviation_overall(&g->prefill.sparse)));
}

static json_t *decode_json(const generated *g, const figures *f)
{
    return json_pack("{s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o}", "tokens", (json_int_t)f->tokens, "accepted",
                     (json_int_t)g->accepted, "step_seconds", run_real(f->median), "step_seconds_p90",
                     run_real(f->p90), "tokens_per_second", run_real(f->decode_rate), "share_kept",
                     run_real(f->share), "error", run_real(deviation_overall(&g->decode.dense)), "rounding",
                     run_real(deviation_overall(&g->decode.sparse)));
}

static json_t *cost_json(const cost *c)
{
    return json_pack("{s:I, s:I}", "bytes", (json_int_t)moved(c), "operations", (json_int_t)c->operations);
}

static json_t *dense_json(const generated *g, const figures *f)
{
    return json_pack("{s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "steps_sampled", (json_int_t)g->samples,
                     "attention_seconds", run_real(f->again), "dense_seconds", run_real(f->dense),
                     "dense_plain_seconds", run_real(f->plain), "dense_ratio", run_real(f->dense / f->again),
                     "step_cost", cost_json(&g->step_cost.sparse), "step_cost_dense",
                     cost_json(&g->step_cost.dense), "prefill_cost", cost_json(&g->prefill_cost.sparse),
                     "prefill_cost_dense", cost_json(&g->prefill_cost.dense));
}

static json_t *drafts_json(const generated *g)
{
    if (g->twins.tokens == 0)
        return json_null();
    return json_pack("{s:I, s:b}", "tokens_compared", (json_int_t)g->twins.tokens, "same", !g->twins.differs);
}

static int print_json(const generated *g, const figures *f)
{
    const engine *e = &g->server;
    json_t *needles = json_pack("{s:I, s:I, s:o}", "asked", (json_int_t)g->asked, "found", (json_int_t)g->found,
                                "lowest_cosine", run_real(g->lowest_answer));
    json_t *root =
        json_pack("{s:o, s:s, s:s, s:i, s:I, s:I, s:b, s:o, s:o, s:o, s:o, s:o, s:o, s:b, s:s}", "context",
                  context_json(g), "backend", csa_backend_name(csa_context_backend(e->context)), "tier",
                  csa_context_tier(e->context), "threads", csa_context_threads(e->context), "block_size",
                  (json_int_t)g->options.block_size, "chunk", (json_int_t)e->options.chunk, "plain_mean",
                  g->options.plain_mean, "memory", memory_json(g, f), "prefill", prefill_json(g, f), "decode",
                  decode_json(g, f), "needles", needles, "dense", dense_json(g, f), "drafts_check",
                  drafts_json(g), "ok", !g->verdict.failed, "verdict", g->verdict.text);
    return tool_print_json("run", root);
}

int generated_print(generated *g)
{
    figures f = gather(g);
    if (g->options.json)
        return print_json(g, &f);
    print_text(g, &f);
    return TOOL_OK;
}
