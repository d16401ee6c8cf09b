/*
 * A subcommand's options, and its JSON.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "options.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool parse_real(const char *text, double *value)
{
    char *end;
    *value = strtod(text, &end);
    return end != text && *end == '\0' && isfinite(*value) && *value > 0;
}

static bool parse_list(const tool_option *option, const char *text, tool_list *list)
{
    list->count = 0;
    for (;;) {
        char item[24];
        size_t length = strcspn(text, ",");
        if (length >= sizeof item || list->count == TOOL_LIST_MAX)
            return false;
        memcpy(item, text, length);
        item[length] = '\0';
        if (!tool_number(item, option->low, option->high, &list->items[list->count++]))
            return false;
        if (text[length] == '\0')
            return true;
        text += length + 1;
    }
}

static bool parse_value(const tool_option *option, const char *text)
{
    switch (option->kind) {
    case OPTION_NUMBER:
        return tool_number(text, option->low, option->high, option->value);
    case OPTION_REAL:
        return parse_real(text, option->value);
    case OPTION_BACKEND:
        return tool_backend(text, option->value);
    case OPTION_LIST:
        return parse_list(option, text, option->value);
    case OPTION_TEXT:
        *(const char **)option->value = text;
        return true;
    case OPTION_FLAG:
    case OPTION_OPERANDS:
        break;
    }
    return false;
}

static int wrong_value(const char *subcommand, const tool_option *option, const char *text)
{
    switch (option->kind) {
    case OPTION_NUMBER:
        return tool_fail(TOOL_USAGE, subcommand, "%s takes a number from %" PRId64 " to %" PRId64 ", not '%s'",
                         option->name, option->low, option->high, text);
    case OPTION_REAL:
        return tool_fail(TOOL_USAGE, subcommand, "%s takes a positive number, not '%s'", option->name, text);
    case OPTION_BACKEND:
        return tool_fail(TOOL_USAGE, subcommand, "%s takes ref, cpu, cuda or default, not '%s'", option->name,
                         text);
    case OPTION_LIST:
        return tool_fail(TOOL_USAGE, subcommand,
                         "%s takes up to %d numbers from %" PRId64 " to %" PRId64
                         " with commas between, not '%s'",
                         option->name, TOOL_LIST_MAX, option->low, option->high, text);
    default:
        return tool_fail(TOOL_USAGE, subcommand, "%s takes no value", option->name);
    }
}

/* The option an argument names; its name may end at a '='. */
static const tool_option *find_option(const tool_option *options, size_t count, const char *argument)
{
    size_t length = strcspn(argument, "=");
    for (size_t i = 0; i < count; i++)
        if (options[i].kind != OPTION_OPERANDS && strlen(options[i].name) == length &&
            strncmp(options[i].name, argument, length) == 0)
            return &options[i];
    return NULL;
}

/* Stores the option at argv[*at] and moves *at to its last argument. */
static int take_option(const tool_option *option, int argc, char **argv, int *at)
{
    const char *value = strchr(argv[*at], '=');
    if (option->kind == OPTION_FLAG && !value) {
        *(bool *)option->value = true;
        return TOOL_OK;
    }
    if (value)
        value++;
    else if (*at + 1 < argc)
        value = argv[++*at];
    else
        return tool_fail(TOOL_USAGE, argv[0], "%s needs a value", option->name);
    return parse_value(option, value) ? TOOL_OK : wrong_value(argv[0], option, value);
}

static int unknown_argument(char **argv, int at)
{
    int name = (int)strcspn(argv[0], ":"); /* what follows is where the arguments stand */
    return tool_fail(TOOL_USAGE, argv[0], "unknown argument '%s'; `csa %.*s --help` lists what there is",
                     argv[at], name, argv[0]);
}

static int take_operand(const tool_option *options, size_t count, char **argv, int at)
{
    for (size_t i = 0; i < count; i++)
        if (options[i].kind == OPTION_OPERANDS) {
            tool_operands *operands = options[i].value;
            operands->items = argv + 1;
            operands->items[operands->count++] = argv[at];
            return TOOL_OK;
        }
    return unknown_argument(argv, at);
}

bool tool_options(int argc, char **argv, const tool_option *options, size_t count, const char *help, int *code)
{
    bool operands_only = false;
    *code = TOOL_OK;
    for (int i = 1; i < argc && *code == TOOL_OK; i++) {
        const tool_option *option = find_option(options, count, argv[i]);
        if (operands_only || argv[i][0] != '-')
            *code = take_operand(options, count, argv, i);
        else if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            fputs(help, stdout);
            return false;
        } else if (strcmp(argv[i], "--") == 0)
            operands_only = true;
        else if (option)
            *code = take_option(option, argc, argv, &i);
        else
            *code = unknown_argument(argv, i);
    }
    return *code == TOOL_OK;
}

int tool_print_json(const char *subcommand, json_t *document)
{
    int failed = document ? json_dumpf(document, stdout, JSON_INDENT(2)) : -1;
    json_decref(document);
    if (failed)
        return tool_fail(TOOL_INTERNAL, subcommand, "cannot write JSON");
    putchar('\n');
    return TOOL_OK;
}
