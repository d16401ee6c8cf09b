/*
 * csa run: a generated context.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "run_generated.h"
#include "judge.h"

#include <inttypes.h>
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { REPEATS = 3 /* of what is timed for comparison */ };

/* ---- Before ------------------------------------------------------------------------------------- */

static void fill_in(int64_t *value, int64_t unsaid, int64_t otherwise)
{
    *value = *value == unsaid ? otherwise : *value;
}

static void fill_defaults(run_options *o)
{
    if (o->topk.count == 0)
        o->topk = (tool_list){.items = {128}, .count = 1};
    o->kv = o->kv ? o->kv : "bf16";
    fill_in(&o->prompt, 0, 8192);
    fill_in(&o->requests, 0, 2);
    fill_in(&o->steps, 0, 48);
    fill_in(&o->drafts, -1, 3);
    fill_in(&o->seed, -1, 1);
    fill_in(&o->groups, 0, 1);
    fill_in(&o->heads, 0, 16);
    fill_in(&o->index_heads, 0, 4);
    int64_t room = o->prompt / CSA_REGION / 4;
    room = room < o->steps ? room : o->steps;
    fill_in(&o->needles, -1, room < 8 ? room : 8);
}

static int check_room(const run_options *o)
{
    if (o->needles > o->steps || o->needles > o->prompt / CSA_REGION / 4)
        return tool_fail(TOOL_USAGE, "run",
                         "%" PRId64 " needles need as many steps and %" PRId64 " tokens of prompt", o->needles,
                         o->needles * CSA_REGION * 4);
    return TOOL_OK;
}

engine_options generated_engine(const run_options *o)
{
    return (engine_options){.backend = o->backend,
                            .tier = o->tier,
                            .threads = (int32_t)o->threads,
                            .block_size = o->block_size,
                            .chunk = o->chunk < o->requests * o->prompt ? o->chunk : o->requests * o->prompt,
                            .topk = o->topk.items[0],
                            .query_len = o->drafts + 1,
                            .e4m3 = strcmp(o->kv, "e4m3") == 0};
}

static bool allocate(generated *g)
{
    const run_options *o = &g->options;
    size_t tokens = (size_t)g->source.options.tokens, groups = (size_t)o->groups;
    g->key = calloc(tokens * groups, CSA_HEAD_SIZE * sizeof *g->key);
    g->value = calloc(tokens * groups, CSA_HEAD_SIZE * sizeof *g->value);
    g->view = (run_context){.tokens = (int64_t)tokens,
                            .queries = 1,
                            .groups = o->groups,
                            .heads = o->heads,
                            .head_size = CSA_HEAD_SIZE,
                            .scale = 1 / sqrtf(CSA_HEAD_SIZE),
                            .key = g->key,
                            .value = g->value};
    dense_step step = engine_dense_step(&g->server, 0);
    g->scratch = calloc(dense_scratch(&step), sizeof *g->scratch);
    g->dense_out = calloc((size_t)(o->requests * (o->drafts + 1) * o->groups * o->heads),
                          CSA_HEAD_SIZE * sizeof *g->dense_out);
    g->step_seconds = calloc((size_t)o->steps, sizeof *g->step_seconds);
    bool drawn =
        !o->svg || heatmap_open(&g->map, o->steps * (o->drafts + 1), (int64_t)(tokens - 1) / CSA_REGION + 1);
    return g->key && g->value && g->scratch && g->dense_out && g->step_seconds && drawn &&
           exact_open(&g->exact, &g->view);
}

static int prepare(generated *g)
{
    const run_options *o = &g->options;
    generate_options source = {.seed = (uint64_t)o->seed,
                               .requests = o->requests,
                               .prompt = o->prompt,
                               .tokens = o->prompt + o->steps * (o->drafts + 1),
                               .steps = o->steps,
                               .needles = o->needles,
                               .groups = o->groups,
                               .heads = o->heads,
                               .index_heads = o->index_heads,
                               .plain_mean = o->plain_mean};
    engine_options server = generated_engine(o);
    if (o->threads > 0)
        omp_set_num_threads((int)o->threads);
    if (!generate_open(&g->source, &source))
        return tool_fail(TOOL_INTERNAL, "run", "no memory for %" PRId64 " tokens", source.tokens);
    int code = engine_open(&g->server, &g->source, &server);
    if (code == TOOL_OK && !allocate(g))
        code = tool_fail(TOOL_INTERNAL, "run", "no memory to compare %" PRId64 " tokens", source.tokens);
    return code;
}

/* ---- Judging a step ----------------------------------------------------------------------------- */

static const uint16_t *output_of(const generated *g, int64_t token, int64_t head)
{
    return g->server.out + (token * g->options.groups * g->options.heads + head) * CSA_HEAD_SIZE;
}

static const int64_t *list_of(const generated *g, int64_t token, int64_t group)
{
    return g->server.selected + (token * g->options.groups + group) * (g->server.width + 1);
}

static void look_at_numbers(generated *g)
{
    int64_t values = g->server.count * g->options.groups * g->options.heads * CSA_HEAD_SIZE;
    unsigned wrong = 0;
    for (int64_t i = 0; i < values; i++)
        wrong |= (g->server.out[i] & 0x7F80) == 0x7F80; /* infinity or NaN */
    g->not_finite |= wrong != 0;
}

/* What an output is multiplied by. */
static double gate_of(const generated *g, int64_t token, int64_t head)
{
    double gate = judge_value(CSA_BF16, g->server.in.gate, token * g->options.groups * g->options.heads + head);
    return judge_round_bf16(1 / (1 + exp(-gate)));
}

static void scale(double *values, double factor)
{
    for (int i = 0; i < CSA_HEAD_SIZE; i++)
        values[i] *= factor;
}

static void compare_head(generated *g, int64_t token, int64_t head, sampled_rows *rows)
{
    double got[CSA_HEAD_SIZE], want[CSA_HEAD_SIZE], dense[CSA_HEAD_SIZE], gate = gate_of(g, token, head);
    const int64_t *list = list_of(g, token, head / g->options.heads);
    double share = exact_sparse(&g->exact, 0, head, list, g->server.width + 1, want);
    if (share < 0) {
        rows->bad_list = true;
        return;
    }
    quality_widen(output_of(g, token, head), CSA_HEAD_SIZE, got);
    memcpy(dense, g->exact.out + head * CSA_HEAD_SIZE, sizeof dense);
    scale(want, gate);
    scale(dense, gate);
    rows->lowest_share = rows->sparse.pairs == 0 || share < rows->lowest_share ? share : rows->lowest_share;
    rows->share += share;
    deviation_add(&rows->sparse, got, want, CSA_HEAD_SIZE);
    deviation_add(&rows->dense, got, dense, CSA_HEAD_SIZE);
}

/* One token of the last step, all groups and heads, against exact attention over the cache as it is. */
static void compare_token(generated *g, int64_t token, sampled_rows *rows)
{
    int64_t heads = g->options.groups * g->options.heads;
    g->view.tokens = g->server.positions[token] + 1;
    g->view.query = g->server.in.query + token * heads * CSA_HEAD_SIZE; /* prepared in place */
    engine_gather(&g->server, g->server.places[token].request, g->view.tokens, g->key, g->value);
    exact_dense(&g->exact, 0);
    for (int64_t head = 0; head < heads; head++)
        compare_head(g, token, head, rows);
}

static void compare_dense(const generated *g, const float *out, deviation *d)
{
    double got[CSA_HEAD_SIZE];
    for (int64_t head = 0; head < g->options.groups * g->options.heads; head++) {
        for (int i = 0; i < CSA_HEAD_SIZE; i++)
            got[i] = (double)out[head * CSA_HEAD_SIZE + i];
        deviation_add(d, got, g->exact.out + head * CSA_HEAD_SIZE, CSA_HEAD_SIZE);
    }
}

/* Dense attention, by the library's kernels of all tokens, by plain loops of one whose exact attention is
 * known; the best time of a few. */
static int time_dense(generated *g, int64_t token, double *kernels, double *plain)
{
    dense_step step = engine_dense_step(&g->server, token);
    int code = run_dense_step(&g->server, REPEATS, g->dense_out, kernels);
    if (code != TOOL_OK)
        return code;
    compare_dense(g, g->dense_out + token * step.groups * step.heads * CSA_HEAD_SIZE, &g->kernels);
    *plain = INFINITY;
    for (int i = 0; i < REPEATS; i++) {
        double start = tool_seconds();
        dense_decode(&step, g->view.query, g->scratch, g->dense_out);
        *plain = fmin(*plain, tool_seconds() - start);
    }
    compare_dense(g, g->dense_out, &g->plain);
    return TOOL_OK;
}

/* The last step's attention once more by a call of its own, which must give the same bits; as often, and the
 * best time as well. */
static int attend_again(generated *g, double *best)
{
    size_t values = (size_t)(g->server.count * g->options.groups * g->options.heads) * CSA_HEAD_SIZE;
    *best = INFINITY;
    for (int i = 0; i < REPEATS; i++) {
        int code = engine_attend_again(&g->server);
        if (code != TOOL_OK)
            return code;
        *best = fmin(*best, g->server.seconds);
    }
    g->differs_again |= memcmp(g->server.out, g->server.again, values * sizeof *g->server.out) != 0;
    return TOOL_OK;
}

static double cosine(const uint16_t *codes, const float *values)
{
    double got[CSA_HEAD_SIZE], dot = 0, a = 0, b = 0;
    quality_widen(codes, CSA_HEAD_SIZE, got);
    for (int i = 0; i < CSA_HEAD_SIZE; i++) {
        dot += got[i] * (double)values[i];
        a += got[i] * got[i];
        b += (double)values[i] * (double)values[i];
    }
    return dot / sqrt(a * b);
}

static bool holds(const int64_t *list, int64_t length, int64_t region)
{
    for (int64_t i = 0; i < length; i++)
        if (list[i] == region)
            return true;
    return false;
}

/* A token that asks for a needle must have its region in the lists of all groups. */
static void look_for_needle(generated *g, int64_t token, int64_t request, int64_t needle)
{
    const run_options *o = &g->options;
    int64_t region = g->source.needles[request * o->needles + needle] / CSA_REGION;
    bool found = true;
    for (int64_t head = 0; head < o->groups * o->heads; head++) {
        int64_t group = head / o->heads;
        double answer =
            cosine(output_of(g, token, head), generate_needle_value(&g->source, request, needle, group));
        found &= holds(list_of(g, token, group), g->server.width + 1, region);
        g->lowest_answer = g->lowest_answer <= answer ? g->lowest_answer : answer;
    }
    g->asked++;
    g->found += found;
}

/* ---- Steps -------------------------------------------------------------------------------------- */

static int prefill(generated *g)
{
    int64_t total = g->options.requests * g->options.prompt, chunk = g->server.options.chunk;
    int64_t chunks = (total - 1) / chunk + 1, samples = chunks < RUN_SAMPLES / 2 ? chunks : RUN_SAMPLES / 2;
    for (int64_t i = 0; i < chunks; i++) {
        int64_t first = i * chunk, count = total - first < chunk ? total - first : chunk;
        int code = engine_prefill(&g->server, first, count);
        if (code != TOOL_OK)
            return code;
        g->prefill_seconds += g->server.seconds;
        look_at_numbers(g);
        if ((i + 1) * samples / chunks > i * samples / chunks)
            compare_token(g, count - 1, &g->prefill);
        tool_progress("prefill", first + count, total);
    }
    return TOOL_OK;
}

/* A sampled step: its attention again, and one of its tokens that counts compared with dense attention. */
static int sample_step(generated *g)
{
    int64_t request = g->samples % g->options.requests, query_len = g->options.drafts + 1;
    int64_t token = request * query_len + g->samples % engine_accepted(&g->server, request);
    int code = attend_again(g, &g->again_seconds[g->samples]);
    if (code != TOOL_OK)
        return code;
    compare_token(g, token, &g->decode);
    code = time_dense(g, token, &g->dense_seconds[g->samples], &g->plain_seconds[g->samples]);
    g->samples++;
    return code;
}

static void draw_token(generated *g, int64_t token, int64_t needle)
{
    int64_t position = g->server.positions[token], row = position - g->options.prompt;
    for (int64_t group = 0; group < g->options.groups; group++)
        heatmap_add(&g->map, row, position, position / CSA_REGION, list_of(g, token, group),
                    g->server.width + 1);
    if (needle >= 0)
        heatmap_add_mark(&g->map, row, g->source.needles[needle] / CSA_REGION);
}

/* The tokens of the step that count. */
static void look_at_tokens(generated *g)
{
    for (int64_t r = 0; r < g->options.requests; r++)
        for (int64_t i = 0; i < engine_accepted(&g->server, r); i++) {
            int64_t token = r * (g->options.drafts + 1) + i;
            int64_t needle = generate_token_at(&g->source, r, g->server.positions[token])->ask;
            if (needle >= 0)
                look_for_needle(g, token, r, needle);
            if (r == 0 && g->options.svg)
                draw_token(g, token, needle);
        }
}

static int decode(generated *g)
{
    int64_t steps = g->options.steps, samples = steps < RUN_SAMPLES ? steps : RUN_SAMPLES;
    g->lowest_answer = 1;
    for (int64_t i = 0; i < steps; i++) {
        int code = engine_decode(&g->server);
        if (code != TOOL_OK)
            return code;
        g->step_seconds[i] = g->server.seconds;
        g->decode_seconds += g->server.seconds;
        look_at_numbers(g);
        look_at_tokens(g);
        if ((i + 1) * samples / steps > i * samples / steps)
            code = sample_step(g);
        if (code != TOOL_OK)
            return code;
        g->accepted += engine_advance(&g->server);
        tool_progress("decode ", i + 1, steps);
    }
    return TOOL_OK;
}

/* ---- After -------------------------------------------------------------------------------------- */

static void count_costs(generated *g)
{
    const run_options *o = &g->options;
    int64_t longest = 0;
    for (int64_t r = 0; r < o->requests; r++)
        longest = g->server.length[r] > longest ? g->server.length[r] : longest;
    cost_model model = {.context = longest,
                        .batch = o->requests,
                        .groups = o->groups,
                        .heads = o->heads,
                        .index_heads = o->index_heads,
                        .query_len = o->drafts + 1,
                        .topk = o->topk.items[0],
                        .block_size = o->block_size,
                        .e4m3 = g->server.options.e4m3};
    g->step_cost = cost_of_step(&model, o->requests, o->drafts + 1, false);
    model.context = o->prompt;
    g->prefill_cost = cost_of_step(&model, o->requests, o->prompt, true);
}

static void judge(generated *g)
{
    run_verdict *v = &g->verdict;
    if (g->not_finite)
        run_fail(v, "an output is not finite");
    run_judge_dense(v, &g->plain);
    run_judge_sparse(v, "dense attention by csa_attend", &g->kernels, &g->kernels, false);
    run_judge_sparse(v, "prefill", &g->prefill.sparse, &g->prefill.dense, g->prefill.bad_list);
    run_judge_sparse(v, "decode", &g->decode.sparse, &g->decode.dense, g->decode.bad_list);
    if (g->differs_again)
        run_fail(v, "csa_layer and csa_decode differ");
    if (g->asked != g->options.needles * g->options.requests || g->found != g->asked)
        run_fail(v, "%" PRId64 " of %" PRId64 " needles were asked for, %" PRId64 " found", g->asked,
                 g->options.needles * g->options.requests, g->found);
    if (g->twins.differs)
        run_fail(v, "with drafts and without, the same tokens give different %s", g->twins.differs);
    if (!v->failed)
        snprintf(v->text, sizeof v->text, "attention is exact within rounding over what was selected%s%s",
                 g->asked > 0 ? ", every needle was found" : "",
                 g->twins.tokens > 0 ? ", drafts change no bit" : "");
}

static int draw(generated *g)
{
    const run_options *o = &g->options;
    heatmap *h = &g->map;
    snprintf(h->title, sizeof h->title, "A generated context: what the tokens of request 0 select");
    snprintf(h->subtitle, sizeof h->subtitle,
             "%" PRId64 " tokens of prompt, %" PRId64 " steps with %" PRId64 " drafts, topk %" PRId64
             ", mean over %" PRId64 " groups, seed %" PRId64,
             o->prompt, o->steps, o->drafts, o->topk.items[0], o->groups, o->seed);
    h->row_name = "position of the token";
    h->selected_name = "selected regions, share of a cell's regions and groups";
    h->mark_name = o->needles > 0 ? "needle asked for" : NULL;
    return heatmap_write(h, "run", o->svg);
}

static int serve_and_judge(generated *g)
{
    int code = prepare(g);
    if (code == TOOL_OK)
        code = prefill(g);
    if (code == TOOL_OK)
        code = decode(g);
    if (code == TOOL_OK)
        code = run_twins_compare(&g->options, &g->twins);
    if (code == TOOL_OK && g->options.svg)
        code = draw(g);
    if (code != TOOL_OK)
        return code;
    count_costs(g);
    judge(g);
    code = generated_print(g);
    if (code != TOOL_OK)
        return code;
    return g->verdict.failed ? TOOL_CHECK_FAILED : TOOL_OK;
}

int run_generated(const run_options *options)
{
    generated g = {.options = *options};
    fill_defaults(&g.options);
    int code = check_room(&g.options);
    if (code != TOOL_OK)
        return code;
    code = serve_and_judge(&g);
    engine_close(&g.server);
    generate_close(&g.source);
    exact_close(&g.exact);
    heatmap_close(&g.map);
    free(g.key);
    free(g.value);
    free(g.scratch);
    free(g.dense_out);
    free(g.step_seconds);
    return code;
}
