/*
 * Section 3's softmax over a closed region's rows, LANES channels at a time; summarize_host.c says which rows
 * and where the summary goes.
 *
 * Each row's maximum is one scalar for all channels, so the running maxima are found first; then a channel's
 * sums stay in registers over the eight rows. Nothing is added across channels: the order is the
 * specification's.
 *
 * Bound by the exponentials, 256 a row.
 * SPDX-License-Identifier: Apache-2.0
 */

/* The largest of a row's z and of `max`, NaN if any is. */
static float summarize_max(const uint16_t *z, float max)
{
    float lanes[LANES];
    vf largest = vf_set1(max);
    for (int i = 0; i < CSA_SUMMARY_SIZE; i += LANES) {
        vf x = vf_load_bf16(z + i);
        largest = vf_choose((vi)(x > largest) | (vi)(x != x), x, largest);
    }
    vf_store(lanes, largest);
    for (int i = 0; i < LANES; i++)
        max = isnan(max) || max > lanes[i] ? max : lanes[i];
    return max;
}

/* e^x for x <= 0, subnormal results too: beside a denominator of 1e-20 they may count. */
static inline vf summarize_exp(vf x)
{
    vi tiny = (vi)(x < vf_set1(-80.0F));
    vf raised = x + (vf)(tiny & (vi)vf_set1(44.0F));                                  /* exact there */
    return vf_exp(raised) * vf_choose(tiny, vf_set1(0x1.6f741ep-64F), vf_set1(1.0F)); /* e^-44 */
}

static void summarize_rows(const csa_region_rows *rows, uint8_t *summary)
{
    float max[CSA_REGION + 1] = {-INFINITY}, fade[CSA_REGION];
    for (int r = 0; r < rows->count; r++) {
        max[r + 1] = summarize_max(rows->z[r], max[r]);
        fade[r] = expf(max[r] - max[r + 1]);
    }
    for (int i = 0; i < CSA_SUMMARY_SIZE; i += LANES) {
        vf num = vf_set1(0), den = vf_set1(0);
        for (int r = 0; r < rows->count; r++) {
            vf scale = (vf)((vi)(den > vf_set1(0)) & (vi)vf_set1(fade[r]));
            vf weight = summarize_exp(vf_load_bf16(rows->z[r] + i) - vf_set1(max[r + 1]));
            num = num * scale + weight * vf_load_bf16(rows->key[r] + i);
            den = den * scale + weight;
        }
        vf_store_e4m3(summary + i, vf_round_bf16(num / vf_max(den, vf_set1(1e-20F))));
    }
}

static csa_status summarize_decode(const csa_context *context, const csa_summarize_args *args)
{
    return csa_host_summarize_decode(context, args, summarize_rows);
}

static csa_status summarize_verify(const csa_context *context, const csa_summarize_args *args)
{
    return csa_host_summarize_verify(context, args, summarize_rows);
}

static csa_status summarize_prefill(const csa_context *context, const csa_summarize_args *args)
{
    return csa_host_summarize_prefill(context, args, summarize_rows);
}

static csa_status summarize_metadata(const csa_context *context, const csa_summarize_args *args)
{
    return csa_host_summarize_metadata(context, args);
}

/* ---- A layer's first two stages as one loop ----------------------------------------------------- */

typedef struct summarize_after {
    prepare_call prepare;
    const csa_summarize_args *args;
} summarize_after;

/* A run of query_len tokens in one group; with group 0 go the run's index keys, and so its summary. */
static void summarize_prepared(void *data, int64_t index)
{
    summarize_after *s = data;
    int64_t groups = s->prepare.args->index_query.shape[1], length = s->args->tokens->query_len;
    int64_t run = index / groups, group = index % groups;
    for (int64_t token = run * length; token < (run + 1) * length; token++)
        prepare_run(&s->prepare, token * groups + group);
    if (group == 0)
        csa_host_summarize_piece(s->args, summarize_rows, run);
}

/* One after the other where tokens do not stand in equal runs, or where whole runs are too few for the threads.
 */
static csa_status prepare_and_summarize(const csa_context *context, const csa_prepare_args *prepare_args,
                                        const csa_summarize_args *args)
{
    int64_t length = args->tokens->query_len, tokens = args->key.shape[0], runs = tokens / length;
    int64_t pieces = runs * prepare_args->index_query.shape[1];
    bool equal = !csa_present(&args->tokens->query_start) && csa_token_requests(args->tokens) == runs &&
                 runs * length == tokens;
    if (length > 1 && (!equal || pieces < context->threads)) {
        csa_status status = prepare(context, prepare_args);
        return status == CSA_OK ? summarize_verify(context, args) : status;
    }
    summarize_after s = {.args = args};
    prepare_begin(&s.prepare, prepare_args);
    int64_t cost = length * (prepare_cost(prepare_args) + CSA_SUMMARIZE_COST);
    return csa_parallel_small(context, pieces, cost, summarize_prepared, &s);
}
