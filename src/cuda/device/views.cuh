/*
 * What kernels get of the caller's descriptors: pointers and byte strides worked out by the host, so that an
 * address is a few instructions. Small steps are bound by the length of a block's instruction stream.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_VIEWS_CUH
#define CSA_CUDA_VIEWS_CUH

#include "../../tensor.h"

/* ---- Tensors ------------------------------------------------------------------------------------ */

/* A tensor of up to three extents before the last; absent: data is NULL. */
struct view {
    uint8_t *data;
    int64_t step[3];

    __device__ uint8_t *at(uint32_t i, uint32_t j = 0, uint32_t k = 0) const
    {
        return data + i * step[0] + j * step[1] + k * step[2];
    }
    __device__ explicit operator bool() const
    {
        return data != nullptr;
    }
};

static inline view csa_view(const csa_tensor &t)
{
    view v = {};
    if (t.ndim == 0)
        return v;
    v.data = (uint8_t *)t.data;
    for (int i = 0; i < t.ndim && i < 3; i++)
        v.step[i] = t.shape[i] > 1 ? t.stride[i] * csa_itemsize(t.dtype) : 0;
    return v;
}

/* Base and strides are multiples of 16 bytes, so that every row of the last extent starts at one. */
static inline bool csa_aligned(const csa_tensor *t)
{
    bool aligned = (uintptr_t)t->data % 16 == 0;
    for (int i = 0; i + 1 < t->ndim; i++)
        aligned = aligned && (t->shape[i] <= 1 || t->stride[i] * csa_itemsize(t->dtype) % 16 == 0);
    return aligned;
}

/* 16 bytes at any address. Out of line: it is rare and long. */
static __device__ __noinline__ uint4 load_16_bytes(const uint8_t *p)
{
    uint32_t words[4] = {};
    for (int i = 0; i < 16; i++)
        words[i / 4] |= (uint32_t)p[i] << i % 4 * 8;
    return make_uint4(words[0], words[1], words[2], words[3]);
}

template <bool ALIGNED> static __device__ __forceinline__ uint4 load_16(const uint8_t *p)
{
    return ALIGNED ? __ldg((const uint4 *)p) : load_16_bytes(p);
}

/* Dividing costs as much as a load from the cache; most often there is one group, one token. */
static __device__ __forceinline__ uint32_t quotient(uint32_t a, uint32_t b)
{
    return b == 1 ? a : a / b;
}

/* ---- Tokens ------------------------------------------------------------------------------------- */

/* Where a token stands and whose it is: tokens.h, in the device's terms. */
struct token_place {
    int64_t position; /* -1: inactive */
    int owner;        /* -1: no request's */
};

struct token_source {
    const uint8_t *slots, *positions, *owners, *seq_lens, *query_start; /* NULL: absent */
    int64_t slot_step, position_step, owner_step, length_step, start_step;
    uint32_t query_len, requests;

    __device__ int start_of(int request) const
    {
        return query_start ? *(const int32_t *)(query_start + request * start_step)
                           : (int)(request * query_len);
    }

    __device__ int owner_of(uint32_t token) const
    {
        int64_t owner = quotient(token, query_len);
        if (owners) {
            owner = *(const int64_t *)(owners + token * owner_step);
        } else if (query_start) { /* the last request that starts at or before the token */
            int low = 0, high = (int)requests;
            if ((int64_t)token >= start_of(high))
                return -1;
            while (low < high) {
                int middle = low + (high - low) / 2;
                if (start_of(middle) <= (int64_t)token)
                    low = middle + 1;
                else
                    high = middle;
            }
            owner = low - 1;
        }
        return owner >= 0 && owner < requests ? (int)owner : -1;
    }

    /* Loads do not wait for each other, except for an owner's length. */
    __device__ token_place place(uint32_t token) const
    {
        int64_t slot = slots ? *(const int64_t *)(slots + token * slot_step) : 0;
        int64_t position = positions ? *(const int64_t *)(positions + token * position_step) : -1;
        token_place p = {-1, owner_of(token)};
        if (!positions && seq_lens && p.owner >= 0) /* neither: rows say it */
            position =
                (int64_t) * (const int32_t *)(seq_lens + p.owner * length_step) - start_of(p.owner + 1) + token;
        if (slot >= 0 && position >= 0)
            p.position = position;
        return p;
    }
};

static inline token_source csa_token_source(const csa_tokens &t)
{
    token_source s = {};
    view slots = csa_view(t.slots), positions = csa_view(t.positions), owners = csa_view(t.owners);
    view lengths = csa_view(t.seq_lens), starts = csa_view(t.query_start);
    s.slots = slots.data, s.slot_step = slots.step[0];
    s.positions = positions.data, s.position_step = positions.step[0];
    s.owners = owners.data, s.owner_step = owners.step[0];
    s.seq_lens = lengths.data, s.length_step = lengths.step[0];
    s.query_start = starts.data, s.start_step = starts.step[0];
    s.query_len = t.query_len > 0 ? (uint32_t)t.query_len : 1;
    s.requests = (uint32_t)(t.block_table.shape[0] < INT32_MAX ? t.block_table.shape[0] : INT32_MAX);
    return s;
}

/* ---- The block table ---------------------------------------------------------------------------- */

struct block_map {
    const uint8_t *table;
    int64_t row_step;
    int64_t columns; /* of the table */
    uint32_t blocks; /* of the cache */

    /* A request's row; NULL if it has none. */
    __device__ const int32_t *row(int owner) const
    {
        return owner < 0 ? nullptr : (const int32_t *)(table + owner * row_step);
    }
    /* What the table says of a column, which `valid` has to judge; -1 where the table has no such column. */
    __device__ int entry(const int32_t *row, int64_t column) const
    {
        return row && column < columns ? __ldg(row + column) : -1;
    }
    __device__ bool valid(int entry) const
    {
        return (uint32_t)entry < blocks;
    }
};

static inline block_map csa_block_map(const csa_tensor &table, int64_t blocks)
{
    view v = csa_view(table);
    block_map m = {v.data, v.step[0], 0, 0};
    m.columns = table.shape[1];
    m.blocks = (uint32_t)(blocks < INT32_MAX ? blocks : INT32_MAX);
    return m;
}

#endif
