/*
 * What goes into a subcommand and comes out: options, as a table (`--name value`, `--name=value` and flags),
 * and JSON. SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOOL_OPTIONS_H
#define CSA_TOOL_OPTIONS_H

#include "tool.h"

typedef enum tool_option_kind {
    OPTION_FLAG,    /* bool: set to true */
    OPTION_NUMBER,  /* int64_t in [low, high] */
    OPTION_REAL,    /* double, positive and finite */
    OPTION_TEXT,    /* const char * into argv */
    OPTION_BACKEND, /* csa_backend */
    OPTION_LIST,    /* tool_list of numbers in [low, high], separated by commas */
    OPTION_OPERANDS /* tool_operands: what is no option; its name is for the reader of the table */
} tool_option_kind;

enum { TOOL_LIST_MAX = 16 };

typedef struct tool_list {
    int64_t items[TOOL_LIST_MAX];
    int64_t count;
} tool_list;

typedef struct tool_operands {
    char **items; /* into argv, whose entries are moved together */
    int count;
} tool_operands;

typedef struct tool_option {
    const char *name; /* with its two dashes */
    tool_option_kind kind;
    void *value;
    int64_t low, high;
} tool_option;

/* Stores what argv says. False if the subcommand is to end with *code: help was asked for and printed, or an
 * argument is wrong, which was said. Operands, wanted or not, may stand anywhere; after `--` all are. */
bool tool_options(int argc, char **argv, const tool_option *options, size_t count, const char *help, int *code);

/* Prints a document on stdout and releases it. Returns an exit code: NULL, what jansson gives without memory,
 * is an internal error. */
struct json_t;
int tool_print_json(const char *subcommand, struct json_t *document);

#endif
