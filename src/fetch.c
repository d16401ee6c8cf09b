/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch.h"
#include "cuda/module.h"

#include <stdlib.h>

bool csa_checking(csa_fetched *f, csa_checker *c, const csa_context *context, void *stream)
{
    if (c->status != CSA_OK || !context->check)
        return false;
    *f = (csa_fetched){.checker = c, .context = context, .stream = stream};
    return true;
}

/* Ids have at most two extents, the second without gaps: rows of so many bytes, a stride apart. */
typedef struct rows {
    int64_t count, bytes;
    int64_t stride;        /* bytes */
    int64_t before, reach; /* bytes before the first row, and from the lowest to the highest */
} rows;

static rows rows_of(const csa_tensor *t)
{
    int64_t item = csa_itemsize(t->dtype);
    rows r = {
        .count = t->shape[0], .bytes = t->ndim > 1 ? t->shape[1] * item : item, .stride = t->stride[0] * item};
    int64_t far = (r.count - 1) * r.stride;
    r.before = far < 0 ? -far : 0;
    r.reach = r.before + (far > 0 ? far : 0) + r.bytes;
    return r;
}

static void fetch_bytes(csa_fetched *f, void *to, const void *from, int64_t bytes)
{
    if (f->checker->status == CSA_OK)
        f->checker->status = f->context->cuda->fetch(f->context, to, from, (size_t)bytes, f->stream);
}

/* Close rows are fetched in one piece, gaps and all, however they overlap; far ones each alone. */
static void copy_rows(csa_fetched *f, csa_tensor *t, const rows *r, bool close, char *copy)
{
    const char *data = t->data;
    if (close) {
        fetch_bytes(f, copy, data - r->before, r->reach);
        t->data = copy + r->before;
        return;
    }
    for (int64_t i = 0; i < r->count && f->checker->status == CSA_OK; i++)
        fetch_bytes(f, copy + i * r->bytes, data + i * r->stride, r->bytes);
    t->data = copy;
    t->stride[0] = r->bytes / csa_itemsize(t->dtype);
}

void csa_fetch(csa_fetched *f, csa_tensor *t)
{
    const int64_t near = 1 << 20, most = INT64_MAX / 4; /* gaps may take so many bytes, or thrice the ids */
    if (!f->context->cuda || f->checker->status != CSA_OK || !csa_present(t) || t->shape[0] == 0 ||
        (t->ndim > 1 && t->shape[1] == 0))
        return;
    rows r = rows_of(t);
    int64_t own = r.bytes > most / 4 / r.count ? most : r.count * r.bytes;
    bool close = r.reach <= near || r.reach / 4 <= own;
    void *copy = malloc((size_t)(close ? r.reach : own));
    if (!copy) {
        csa_refuse(f->checker, CSA_ERROR_MEMORY, "checking mode: no memory for a copy of %lld bytes of ids",
                   (long long)(close ? r.reach : own));
        return;
    }
    f->tensors[f->count].at = t;
    f->tensors[f->count].was = *t;
    f->tensors[f->count++].copy = copy;
    copy_rows(f, t, &r, close, copy);
}

void csa_fetch_tokens(csa_fetched *f, csa_tokens *tokens)
{
    csa_tensor *all[] = {&tokens->block_table, &tokens->slots,       &tokens->positions, &tokens->owners,
                         &tokens->seq_lens,    &tokens->query_start, &tokens->ring_base};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        csa_fetch(f, all[i]);
}

void csa_end_fetch(csa_fetched *f)
{
    while (f->count > 0) {
        f->count--;
        *f->tensors[f->count].at = f->tensors[f->count].was;
        free(f->tensors[f->count].copy);
    }
}
