/* SPDX-License-Identifier: Apache-2.0 */
#include "hostile.h"
#include "oracle.h"

/* ---- Where tokens stand ------------------------------------------------------------------------- */

static int64_t id(const csa_tensor *t, int64_t i)
{
    const void *element = tensor_at(t, i, 0, 0, 0);
    return t->dtype == CSA_I32 ? *(const int32_t *)element : *(const int64_t *)element;
}

static int64_t requests_of(const csa_tokens *k)
{
    if (k->block_table.ndim)
        return k->block_table.shape[0];
    if (k->query_start.ndim)
        return k->query_start.shape[0] - 1;
    return k->seq_lens.ndim ? k->seq_lens.shape[0] : k->ring_base.ndim ? k->ring_base.shape[0] : 0;
}

static int64_t first_token(const csa_tokens *k, int64_t request)
{
    if (k->query_start.ndim)
        return id(&k->query_start, request);
    return request * (k->query_len ? k->query_len : 1);
}

static int64_t owner_of(const csa_tokens *k, int64_t token)
{
    int64_t requests = requests_of(k);
    if (k->owners.ndim) {
        int64_t owner = id(&k->owners, token);
        return owner >= 0 && owner < requests ? owner : -1;
    }
    for (int64_t request = 0; request < requests; request++)
        if (first_token(k, request) <= token && token < first_token(k, request + 1))
            return request;
    return -1;
}

seat spec_seat(const csa_tokens *k, int64_t token)
{
    seat s = {.request = owner_of(k, token), .position = -1};
    if (k->positions.ndim)
        s.position = id(&k->positions, token);
    else if (s.request >= 0)
        s.position = id(&k->seq_lens, s.request) - first_token(k, s.request + 1) + token;
    s.active = s.position >= 0 && !(k->slots.ndim && id(&k->slots, token) < 0);
    return s;
}

/* The block of a region, -1 if there is none. */
static int64_t block_of(const csa_tokens *k, int64_t request, int64_t region, int64_t block_size,
                        int64_t blocks)
{
    int64_t column = region / (block_size / CSA_REGION);
    if (request < 0 || column >= k->block_table.shape[1])
        return -1;
    int64_t block = *(const int32_t *)tensor_at(&k->block_table, request, column, 0, 0);
    return block >= 0 && block < blocks ? block : -1;
}

/* ---- Section 3 ---------------------------------------------------------------------------------- */

static float larger(float a, float b)
{
    return isnan(a) || isnan(b) ? NAN : a > b ? a : b;
}

void spec_summary(float rows[8][512], uint8_t summary[256])
{
    float num[256] = {0}, den[256] = {0}, max = -INFINITY;
    for (int row = 0; row < 8; row++) {
        const float *key = rows[row], *z = key + 256;
        float new_max = max;
        for (int i = 0; i < 256; i++)
            new_max = larger(new_max, z[i]);
        for (int i = 0; i < 256; i++) {
            float scale = den[i] > 0 ? expf(max - new_max) : 0, w = expf(z[i] - new_max);
            num[i] = num[i] * scale + w * key[i];
            den[i] = den[i] * scale + w;
        }
        max = new_max;
    }
    for (int i = 0; i < 256; i++)
        summary[i] = e4m3_code(bf16_rounded(num[i] / fmaxf(den[i], 1e-20F)));
}

/* ---- Section 4 ---------------------------------------------------------------------------------- */

static void expect_metadata(const csa_rows *rows, int64_t row, const seat *s)
{
    int64_t position = s->active ? s->position : 0;
    double expected[] = {s->active, (double)position, (double)(position / 8), (double)(position / 8 + 1),
                         (double)(position / 8)};
    const csa_tensor *outputs[] = {&rows->active, &rows->positions, &rows->current, &rows->lengths,
                                   &rows->topk_lengths};
    for (int i = 0; i < 5; i++)
        CHECKF(!outputs[i]->ndim || tensor_value(outputs[i], row, 0, 0, 0) == expected[i],
               "row %lld, output %d is %g, expected %g", (long long)row, i,
               tensor_value(outputs[i], row, 0, 0, 0), expected[i]);
}

static void expect_score(const csa_score_args *a, int64_t row, int64_t region, const seat *s)
{
    const csa_tensor *summaries = &a->cache->summaries;
    int64_t groups = a->query.shape[1], per_block = summaries->shape[1];
    int64_t block = block_of(a->tokens, s->request, region, per_block * CSA_REGION, summaries->shape[0]);
    float got = *(const float *)tensor_at(&a->scores, row, region, 0, 0), expected = 0;
    double bound = 0;
    if (block >= 0)
        expected = oracle_score(a, row / groups, row % groups,
                                tensor_at(summaries, block, region % per_block, 0, 0), &bound);
    bool near = fabs((double)got - (double)expected) <= bound;
    CHECKF(near || got == expected || (isnan(got) && isnan(expected)), "row %lld, region %lld: %g, expected %g",
           (long long)row, (long long)region, (double)got, (double)expected);
}

void expect_scores(const csa_score_args *a)
{
    int64_t groups = a->query.shape[1], regions = a->scores.shape[1];
    for (int64_t row = 0; row < a->query.shape[0] * groups; row++) {
        seat s = spec_seat(a->tokens, row / groups);
        if (a->rows_out)
            expect_metadata(a->rows_out, row, &s);
        int64_t length = s.active ? s.position / CSA_REGION + 1 : 1;
        for (int64_t region = 0; region < length && region < regions; region++)
            expect_score(a, row, region, &s);
    }
}

/* ---- Section 5 ---------------------------------------------------------------------------------- */

static void expect_list(const csa_select_args *a, int64_t row, int64_t current, int64_t topk)
{
    static int64_t expected[CSA_MAX_TOPK + 1];
    const float *scores = a->scores.data ? tensor_at(&a->scores, row, 0, 0, 0) : NULL;
    oracle_select(scores, a->scores.shape[1], current, topk, expected);
    for (int64_t i = 0; i < a->selected.shape[1]; i++) {
        int64_t got = *(const int64_t *)tensor_at(&a->selected, row, i, 0, 0);
        CHECKF(got == expected[i], "row %lld, entry %lld: %lld, expected %lld", (long long)row, (long long)i,
               (long long)got, (long long)expected[i]);
    }
}

void expect_selected(const csa_select_args *a)
{
    for (int64_t row = 0; row < a->current.shape[0]; row++)
        expect_list(a, row, id(&a->current, row), a->topk ? a->topk : CSA_DEFAULT_TOPK);
}

/* ---- Section 6 ---------------------------------------------------------------------------------- */

static void expect_head(const csa_attend_args *a, const seat *s, int64_t row, int64_t head)
{
    oracle_attention r;
    int64_t token = row / a->query.shape[1], group = row % a->query.shape[1];
    double error = 0, norm = 0, gate = 1;
    oracle_attend(a, s->request, s->active ? s->position : -1, row, head, &r);
    if (a->gate.ndim && r.tokens)
        gate = (double)bf16_rounded((float)oracle_sigmoid(tensor_value(&a->gate, token, group, head, 0)));
    for (int j = 0; j < CSA_HEAD_SIZE; j++) {
        double got = tensor_value(&a->out, token, group, head, j), expected = r.tokens ? r.out[j] * gate : 0;
        CHECKF(expected != 0 || got == 0, "%g, expected 0", got);
        CHECKF(isnan(got) == isnan(expected), "%g, expected %g", got, expected);
        error += isnan(got) ? 0 : (got - expected) * (got - expected);
        norm += isnan(got) ? 0 : expected * expected;
    }
    CHECKF(error <= 8e-3 * 8e-3 * norm, "token %lld, group %lld, head %lld: error %g of %g", (long long)token,
           (long long)group, (long long)head, sqrt(error), sqrt(norm));
    if (!a->lse.ndim)
        return;
    double lse = tensor_value(&a->lse, token, group, head, 0), expected = r.tokens ? r.lse : -(double)INFINITY;
    CHECKF(lse == expected || fabs(lse - expected) <= r.lse_bound, "log-sum-exp %g, expected %g", lse,
           expected);
}

void expect_attended(const csa_attend_args *a)
{
    int64_t groups = a->query.shape[1];
    for (int64_t row = 0; row < a->query.shape[0] * groups; row++) {
        seat s = spec_seat(a->tokens, row / groups);
        if (a->rows) {
            s.position = id(&a->rows->positions, row);
            s.active = *(const uint8_t *)tensor_at(&a->rows->active, row, 0, 0, 0) && s.position >= 0;
        }
        for (int64_t head = 0; head < a->query.shape[2]; head++)
            expect_head(a, &s, row, head);
    }
}

/* ---- Whole steps -------------------------------------------------------------------------------- */

void expect_step(const csa_context *context, const csa_step_args *a)
{
    arena memory = {0};
    int64_t rows = a->query.shape[0] * a->query.shape[1], regions = a->regions;
    int64_t topk = a->topk ? a->topk : CSA_DEFAULT_TOPK;
    if (regions == 0)
        regions = a->tokens->block_table.shape[1] * a->cache->kv.shape[2] / CSA_REGION;
    csa_rows meta = {.size = sizeof meta};
    meta.current = arena_tensor(&memory, "current", NULL, CSA_I64, 1, (int)rows);
    csa_score_args score = {.size = sizeof score, .tokens = a->tokens, .cache = a->cache};
    score.query = a->index_query;
    score.weights = a->index_weights;
    score.scores = arena_tensor(&memory, "scores", NULL, CSA_F32, 2, (int)rows, (int)regions);
    score.rows_out = &meta;
    CHECK_OK(csa_score(context, &score));
    expect_scores(&score);
    csa_select_args select = {.size = sizeof select, .topk = a->topk, .scores = score.scores};
    select.current = meta.current;
    select.selected = a->selected.ndim ? a->selected
                                       : arena_tensor(&memory, "selected", NULL, CSA_I64, 2, (int)rows,
                                                      (int)(topk < regions ? topk : regions) + 1);
    if (!a->selected.ndim)
        CHECK_OK(csa_select(context, &select));
    expect_selected(&select);
    csa_attend_args attend = {.size = sizeof attend, .tokens = a->tokens, .cache = a->cache};
    attend.query = a->query;
    attend.selected = select.selected;
    attend.gate = a->gate;
    attend.out = a->out;
    attend.lse = a->lse;
    attend.scale = a->scale;
    expect_attended(&attend);
    arena_check(&memory);
    arena_free(&memory);
}

/* ---- Small things ------------------------------------------------------------------------------- */

csa_context *plain_context(void)
{
    static csa_context *context;
    if (!context)
        context = test_context((csa_context_options){.threads = 4});
    return context;
}

csa_context *checking_context(void)
{
    static csa_context *context;
    if (!context)
        context = test_context((csa_context_options){.threads = 2, .check = true});
    return context;
}

csa_context *serial_context(void)
{
    static csa_context *context;
    if (!context)
        context = test_context((csa_context_options){.threads = 1});
    return context;
}

csa_tensor ids_i64(arena *memory, const char *name, int64_t count, const int64_t *values)
{
    csa_tensor t = arena_tensor(memory, name, NULL, CSA_I64, 1, (int)count);
    memcpy(t.data, values, (size_t)count * sizeof *values);
    return t;
}

csa_tensor ids_i32(arena *memory, const char *name, int64_t count, const int32_t *values)
{
    csa_tensor t = arena_tensor(memory, name, NULL, CSA_I32, 1, (int)count);
    memcpy(t.data, values, (size_t)count * sizeof *values);
    return t;
}

void token_inputs(world *w, int64_t t, uint64_t tag)
{
    csa_prepare_args *p = &w->prepare;
    csa_tensor *inputs[] = {&p->index_query, &p->index_key, &p->index_weights, &p->query, &p->key,
                            &p->value,       &w->z,         &w->gate};
    test_random r = random_of(tag, 0x746F6B656E);
    for (int i = 0; i < COUNT_OF(inputs); i++) {
        csa_tensor one = tensor_slice(*inputs[i], t, 1);
        tensor_randomise(&one, &r, 1);
    }
}

void expect_refused(csa_status got, csa_status expected, ...)
{
    CHECKF(got == expected, "status %s, expected %s; last error: %s", csa_status_name(got),
           csa_status_name(expected), test_error());
    va_list words;
    va_start(words, expected);
    for (const char *word = va_arg(words, const char *); word; word = va_arg(words, const char *))
        CHECKF(strstr(test_error(), word), "no \"%s\" in: %s", word, test_error());
    va_end(words);
}

/* ---- Who wrote where ---------------------------------------------------------------------------- */

csa_tensor copy_of(arena *memory, const csa_tensor *t)
{
    csa_tensor copy = *t;
    int64_t count = 1;
    for (int d = t->ndim - 1; d >= 0; count *= t->shape[d], d--)
        copy.stride[d] = count;
    copy.data = arena_buffer(memory, "copy", (size_t)(count * tensor_itemsize(t->dtype)))->data;
    for (buffer *b = memory->first; b; b = b->next)
        if (b->data == copy.data)
            buffer_cover(b, &copy);
    tensor_copy(&copy, t);
    return copy;
}

/* Row n of a tensor, counted over all extents but the last. */
static const void *row_at(const csa_tensor *t, int64_t n)
{
    int64_t index[CSA_MAX_DIMS] = {0};
    for (int d = t->ndim - 2; d >= 0; n /= t->shape[d], d--)
        index[d] = n % t->shape[d];
    return tensor_at(t, index[0], index[1], index[2], 0);
}

static bool listed(int64_t n, int64_t count, const int64_t *rows)
{
    for (int64_t i = 0; i < count; i++)
        if (rows[i] == n)
            return true;
    return false;
}

void expect_rows_written(const char *name, const csa_tensor *before, const csa_tensor *after, int64_t count,
                         const int64_t *rows)
{
    int64_t length = after->shape[after->ndim - 1], all = tensor_count(after) / length;
    size_t bytes = (size_t)(length * tensor_itemsize(after->dtype));
    for (int64_t n = 0; n < all; n++) {
        bool changed = memcmp(row_at(before, n), row_at(after, n), bytes) != 0;
        CHECKF(changed == listed(n, count, rows), "%s: row %lld was %swritten", name, (long long)n,
               changed ? "" : "not ");
    }
}
