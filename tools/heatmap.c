/*
 * Selections as an SVG picture.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "heatmap.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MOST_ROWS = 320, /* of a panel, before rows are put together; the same for regions */
    MOST_BINS = 800,
    LEVELS = 8, /* of colour */
    LEFT = 84,  /* where panels begin, in pixels */
    TOP = 78,
    PANEL_WIDTH = 960,
    RIGHT = 172, /* the room for legends */
    GAP = 84,    /* between and below panels: axis, its name, the next panel's name */
    LOW_PANEL = 160,
    HIGH_PANEL = 480
};

static const double faintest_mass = 1e-4; /* of the logarithmic scale; what is less looks like nothing */

static const char *const blues[LEVELS] = {"#d3e4f3", "#b0d2e8", "#86bcdc", "#5ba3cf",
                                          "#3787c0", "#1c6ab0", "#0b4d94", "#08306b"};
static const char *const oranges[LEVELS] = {"#fee3c8", "#fdcf9f", "#fdb06e", "#fb8f3e",
                                            "#ee6b18", "#d54c06", "#a83703", "#7f2704"};

/* ---- Gathering ---------------------------------------------------------------------------------- */

bool heatmap_open(heatmap *h, int64_t rows, int64_t regions)
{
    *h = (heatmap){.rows = rows, .regions = regions};
    h->row_bin = rows > MOST_ROWS ? (rows - 1) / MOST_ROWS + 1 : 1;
    h->region_bin = regions > MOST_BINS ? (regions - 1) / MOST_BINS + 1 : 1;
    h->bins = (regions - 1) / h->region_bin + 1;
    size_t lines = (size_t)((rows - 1) / h->row_bin + 1), cells = lines * (size_t)h->bins;
    h->selected = calloc(cells, sizeof *h->selected);
    h->visible = calloc(cells, sizeof *h->visible);
    h->mass = calloc(cells, sizeof *h->mass);
    h->mass_rows = calloc(lines, sizeof *h->mass_rows);
    h->labels = calloc((size_t)rows, sizeof *h->labels);
    return h->selected && h->visible && h->mass && h->mass_rows && h->labels;
}

void heatmap_close(heatmap *h)
{
    free(h->selected);
    free(h->visible);
    free(h->mass);
    free(h->mass_rows);
    free(h->labels);
}

static int64_t cell_of(const heatmap *h, int64_t row, int64_t region)
{
    return row / h->row_bin * h->bins + region / h->region_bin;
}

static int64_t last_region(const heatmap *h, int64_t current)
{
    return current < h->regions ? current : h->regions - 1;
}

void heatmap_add(heatmap *h, int64_t row, int64_t label, int64_t current, const int64_t *list, int64_t length)
{
    current = last_region(h, current);
    h->rows_used = row >= h->rows_used ? row + 1 : h->rows_used;
    h->labels[row] = label;
    for (int64_t r = 0; r <= current; r++)
        h->visible[cell_of(h, row, r)]++;
    for (int64_t i = 0; i < length; i++)
        if (list[i] >= 0 && list[i] <= current)
            h->selected[cell_of(h, row, list[i])]++;
}

void heatmap_add_mass(heatmap *h, int64_t row, int64_t current, const double *mass)
{
    h->has_mass = true;
    h->mass_rows[row / h->row_bin]++;
    for (int64_t r = 0; r <= last_region(h, current); r++)
        h->mass[cell_of(h, row, r)] += mass[r];
}

void heatmap_add_mark(heatmap *h, int64_t row, int64_t region)
{
    if (h->mark_count < HEATMAP_MARKS)
        h->marks[h->mark_count++] = (heatmap_mark){row, region};
}

/* ---- Drawing ------------------------------------------------------------------------------------ */

typedef struct picture {
    const heatmap *h;
    FILE *out;
    int64_t lines;       /* rows drawn */
    double line, column; /* size of a cell, in pixels */
    double height;       /* of a panel */
} picture;

/* Level of a cell: -1 where no row sees it, 0 for nothing, 1 to LEVELS. */
typedef int (*level_of)(const heatmap *h, int64_t cell);

static int clamp_level(double level)
{
    return level < 1 ? 1 : level > LEVELS ? LEVELS : (int)level;
}

static int selected_level(const heatmap *h, int64_t cell)
{
    if (!(h->visible[cell] > 0))
        return -1;
    return h->selected[cell] > 0 ? clamp_level(ceil(h->selected[cell] / h->visible[cell] * LEVELS)) : 0;
}

static int mass_level(const heatmap *h, int64_t cell)
{
    double share = h->mass[cell] / h->mass_rows[cell / h->bins];
    if (!(h->visible[cell] > 0))
        return -1;
    if (!(share >= faintest_mass))
        return 0;
    return clamp_level(1 + floor(log(share / faintest_mass) / log(1 / faintest_mass) * LEVELS));
}

/* Cells of one level as one path: runs along each line. */
static void draw_level(const picture *p, level_of level, int wanted, const char *colour)
{
    bool begun = false;
    for (int64_t line = 0; line < p->lines; line++)
        for (int64_t end, bin = 0; bin < p->h->bins; bin = end) {
            int is = level(p->h, line * p->h->bins + bin);
            end = bin + 1;
            while (end < p->h->bins && level(p->h, line * p->h->bins + end) == is)
                end++;
            if (is != wanted)
                continue;
            if (!begun)
                fprintf(p->out, "<path fill=\"%s\" d=\"", colour);
            begun = true;
            fprintf(p->out, "M%" PRId64 " %" PRId64 "h%" PRId64 "v1h-%" PRId64 "z", bin, line, end - bin,
                    end - bin);
        }
    if (begun)
        fputs("\"/>\n", p->out);
}

/* Text with what XML would obey replaced. */
static void put_text(FILE *out, const char *text)
{
    for (; *text != '\0'; text++) {
        if (*text == '<')
            fputs("&lt;", out);
        else if (*text == '>')
            fputs("&gt;", out);
        else if (*text == '&')
            fputs("&amp;", out);
        else
            fputc(*text >= ' ' && *text <= '~' ? *text : '?', out);
    }
}

__attribute__((format(printf, 5, 6))) static void label(FILE *out, double x, double y, const char *style,
                                                        const char *format, ...)
{
    char text[HEATMAP_TEXT];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\"%s>", x, y, style);
    put_text(out, text);
    fputs("</text>\n", out);
}

/* 1, 2 or 5 times a power of ten, so that there are at most `most` steps within `range`. */
static int64_t nice_step(int64_t range, int64_t most)
{
    static const int64_t factors[] = {1, 2, 5};
    for (int64_t power = 1;; power *= 10)
        for (int i = 0; i < 3; i++)
            if (range / (power * factors[i]) < most)
                return power * factors[i];
}

/* Of a cell, given where its panel begins. */
static double middle(double begin, int64_t cell, double size)
{
    return begin + ((double)cell + 0.5) * size;
}

static void draw_region_axis(const picture *p, double top)
{
    const heatmap *h = p->h;
    int64_t step = nice_step(h->regions, 12);
    double y = top + p->height;
    for (int64_t r = 0; r < h->regions; r += step) {
        double x = middle(LEFT, r / h->region_bin, p->column);
        fprintf(p->out, "<path class=\"axis\" d=\"M%.1f %.1fv5\"/>\n", x, y);
        label(p->out, x, y + 18, " text-anchor=\"middle\"", "%" PRId64, r);
    }
    char shared[64] = "";
    if (h->region_bin > 1)
        snprintf(shared, sizeof shared, "; %" PRId64 " neighbours share a column", h->region_bin);
    label(p->out, LEFT + PANEL_WIDTH / 2.0, y + 36, " text-anchor=\"middle\"", "region (8 tokens)%s", shared);
}

static void draw_row_axis(const picture *p, double top)
{
    const heatmap *h = p->h;
    int64_t step = nice_step(p->lines, (int64_t)(p->height / 22) + 1);
    for (int64_t line = 0; line < p->lines; line += step) {
        double y = middle(top, line, p->line);
        fprintf(p->out, "<path class=\"axis\" d=\"M%d %.1fh-5\"/>\n", LEFT, y);
        label(p->out, LEFT - 9, y + 4, " text-anchor=\"end\"", "%" PRId64, h->labels[line * h->row_bin]);
    }
    fprintf(p->out, "<text transform=\"translate(18 %.1f) rotate(-90)\" text-anchor=\"middle\">",
            top + p->height / 2);
    put_text(p->out, h->row_name);
    fputs("</text>\n", p->out);
}

static void draw_swatch(const picture *p, double x, double y, const char *colour, const char *text)
{
    fprintf(p->out,
            "<rect x=\"%.1f\" y=\"%.1f\" width=\"16\" height=\"14\" fill=\"%s\" stroke=\"#8a939c\" "
            "stroke-width=\"0.5\"/>\n",
            x, y, colour);
    label(p->out, x + 23, y + 11.5, "", "%s", text);
}

static const char *const nothing = "#f7f8f9", *const unseen = "#dcdfe3";

/* Is every cell one thing or the other? Then there are no shares to explain. */
static bool is_plain(const heatmap *h)
{
    bool plain = true;
    int64_t cells = ((h->rows - 1) / h->row_bin + 1) * h->bins;
    for (int64_t i = 0; i < cells; i++)
        plain &= h->selected[i] == 0 || h->selected[i] == h->visible[i];
    return plain;
}

static void draw_legend(const picture *p, double top, bool mass)
{
    double x = LEFT + PANEL_WIDTH + 22, y = top;
    char text[48];
    int lowest = !mass && is_plain(p->h) ? LEVELS - 1 : 0;
    for (int i = LEVELS - 1; i >= lowest; i--, y += 14) {
        double from = mass ? pow(faintest_mass, 1 - (double)i / LEVELS) : (double)i / LEVELS;
        if (mass)
            snprintf(text, sizeof text, "%.2g %% or more", from * 100);
        else
            snprintf(text, sizeof text, lowest ? "selected" : i ? "over %.3g %%" : "less", from * 100);
        draw_swatch(p, x, y, mass ? oranges[i] : blues[i], text);
    }
    draw_swatch(p, x, y, nothing, mass ? "less" : "not selected");
    draw_swatch(p, x, y + 14, unseen, "not there yet");
    if (mass || !p->h->mark_name)
        return;
    fprintf(p->out, "<circle class=\"mark\" cx=\"%.1f\" cy=\"%.1f\" r=\"5\"/>\n", x + 8, y + 42);
    label(p->out, x + 23, y + 46, "", "%s", p->h->mark_name);
}

static void draw_marks(const picture *p, double top)
{
    const heatmap *h = p->h;
    for (int64_t i = 0; i < h->mark_count; i++)
        fprintf(p->out, "<circle class=\"mark\" cx=\"%.1f\" cy=\"%.1f\" r=\"5\"/>\n",
                middle(LEFT, h->marks[i].region / h->region_bin, p->column),
                middle(top, h->marks[i].row / h->row_bin, p->line));
}

static void draw_panel(const picture *p, double top, bool mass)
{
    level_of level = mass ? mass_level : selected_level;
    label(p->out, LEFT, top - 9, " class=\"name\"", "%s",
          mass ? "share of dense attention's softmax mass" : p->h->selected_name);
    fprintf(p->out, "<g shape-rendering=\"crispEdges\" transform=\"translate(%d %.1f) scale(%.6f %.6f)\">\n",
            LEFT, top, p->column, p->line);
    draw_level(p, level, -1, unseen);
    draw_level(p, level, 0, nothing);
    for (int i = 0; i < LEVELS; i++)
        draw_level(p, level, i + 1, mass ? oranges[i] : blues[i]);
    fputs("</g>\n", p->out);
    fprintf(p->out, "<rect class=\"axis\" x=\"%d\" y=\"%.1f\" width=\"%d\" height=\"%.1f\"/>\n", LEFT, top,
            PANEL_WIDTH, p->height);
    draw_region_axis(p, top);
    draw_row_axis(p, top);
    draw_legend(p, top, mass);
    if (!mass)
        draw_marks(p, top);
}

static void draw(const picture *p)
{
    const heatmap *h = p->h;
    int panels = h->has_mass ? 2 : 1;
    /* The legend needs some room of its own beside a low panel. */
    double step = p->height + GAP > 250 ? p->height + GAP : 250;
    double width = LEFT + PANEL_WIDTH + RIGHT, height = TOP + panels * step;
    fprintf(p->out,
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" "
            "viewBox=\"0 0 %.0f %.0f\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#22272c\">\n",
            width, height, width, height);
    fputs(
        "<style>.axis{fill:none;stroke:#5a636b;stroke-width:1}.mark{fill:none;stroke:#d1105a;stroke-width:1.6}"
        ".title{font-size:17px;font-weight:600}.name{font-weight:600}</style>\n",
        p->out);
    fputs("<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n", p->out);
    label(p->out, LEFT, 26, " class=\"title\"", "%s", h->title);
    label(p->out, LEFT, 45, " fill=\"#5a636b\"", "%s", h->subtitle);
    for (int i = 0; i < panels; i++)
        draw_panel(p, TOP + i * step, i == 1);
    fputs("</svg>\n", p->out);
}

int heatmap_write(const heatmap *h, const char *subcommand, const char *path)
{
    picture p = {.h = h, .lines = h->rows_used > 0 ? (h->rows_used - 1) / h->row_bin + 1 : 0};
    if (p.lines == 0)
        return tool_fail(TOOL_USAGE, subcommand, "there is no selection to draw");
    p.height = (double)p.lines * 10;
    p.height = p.height < LOW_PANEL ? LOW_PANEL : p.height > HIGH_PANEL ? HIGH_PANEL : p.height;
    p.line = p.height / (double)p.lines;
    p.column = (double)PANEL_WIDTH / (double)h->bins;
    p.out = fopen(path, "w");
    if (!p.out)
        return tool_fail(TOOL_INTERNAL, subcommand, "%s: %s", path, strerror(errno));
    draw(&p);
    bool failed = ferror(p.out) != 0;
    failed |= fclose(p.out) != 0;
    return failed ? tool_fail(TOOL_INTERNAL, subcommand, "%s: cannot write the picture", path) : TOOL_OK;
}
