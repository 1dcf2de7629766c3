/* Findings: what the checks see. A finding is recorded once per (kind, instruction, other instruction); a fault also ends the launch. */
#include "machine.h"
#include <stdarg.h>
#include <stdio.h>

static Finding *record(Machine *m, const char *kind, int32_t other_pc, lanes_t on, const char *format, va_list args) {
    Warp *w = m->running;
    int32_t pc = w ? pc_of(w) : -1;
    for (int i = 0; i < m->n_findings; i++) {
        Finding *f = &m->findings[i];
        if (f->pc == pc && f->other_pc == other_pc && !strcmp(f->kind, kind)) {
            f->times++;
            return f;
        }
    }
    if (m->n_findings == MAX_FINDINGS) return &m->findings[MAX_FINDINGS - 1];
    Finding *f = &m->findings[m->n_findings++];
    memset(f, 0, sizeof *f);
    snprintf(f->kind, sizeof f->kind, "%s", kind);
    vsnprintf(f->text, sizeof f->text, format, args);
    f->pc = pc, f->other_pc = other_pc, f->lanes = on, f->times = 1;
    f->cta = w ? (int32_t)w->cta->index : -1;
    f->warp = w ? w->index : -1;
    return f;
}

void finding(Machine *m, const char *kind, int32_t other_pc, lanes_t on, const char *format, ...) {
    va_list args;
    va_start(args, format);
    record(m, kind, other_pc, on, format, args);
    va_end(args);
}

void fault(Machine *m, const char *kind, lanes_t on, const char *format, ...) {
    va_list args;
    va_start(args, format);
    record(m, kind, -1, on, format, args);
    va_end(args);
    m->faulted = 1;
    longjmp(m->stop, 1);
}

void waiting(Warp *w, const char *format, ...) {
    va_list args;
    va_start(args, format);
    Fragment *f = &w->fragments[w->current];
    vsnprintf(f->why, sizeof f->why, format, args);
    va_end(args);
}
