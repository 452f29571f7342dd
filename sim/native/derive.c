/* Which op of a program waits for which: sim/schedule/derive/dependencies.py on flat arrays, to the same result. Ops are
 * numbered in the order of their issue, streams in any. Nothing that is given is written to but what is to be filled. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int32_t i32;
typedef int64_t i64;
typedef uint8_t u8;

typedef struct { i32 edge[8]; } Box;                    /* start, stop of four dimensions; unused ones 0, 1 */
typedef struct { i32 buffer, writes; Box box; } Access;
typedef struct { i32 op, next; Box box; } Seen;         /* a write that is visible, or a read of what one wrote */

typedef struct {                                        /* a program */
    i64 num_ops, num_streams, num_buffers;
    const i32 *stream; const u8 *is_sync;
    const i32 *sync_ends, *sync_streams, *access_ends;
    const Access *accesses; const Box *whole;
} Program;

typedef struct {                                        /* what is filled; as many items as there is room for */
    i64 data_room, waits_room, num_data, num_waits;
    i32 *data_ends, *data, *waits_ends, *waits, *known;
} Found;

enum { DERIVED, OUT_OF_MEMORY };

typedef struct {
    i32 *writers, *readers;                             /* per buffer the first of a list in seen, -1: none */
    i32 *last, *host;                                   /* per stream its last op; what the host knows to have ended */
    Seen *seen; i64 num_seen, room_seen; i32 free;
    i32 *found; i64 num_found, room_found;
} State;

static int same(const Box *a, const Box *b) { return !memcmp(a, b, sizeof *a); }

static int overlap(const Box *a, const Box *b) {
    for (int d = 0; d < 8; d += 2)
        if (a->edge[d] >= b->edge[d + 1] || b->edge[d] >= a->edge[d + 1]) return 0;
    return 1;
}

static int covers(const Box *a, const Box *b) {
    for (int d = 0; d < 8; d += 2)
        if (a->edge[d] > b->edge[d] || b->edge[d + 1] > a->edge[d + 1]) return 0;
    return 1;
}

static int upwards(const void *a, const void *b) {
    i32 x = *(const i32 *)a, y = *(const i32 *)b;
    return (x > y) - (x < y);
}

/* Add the ops of a list whose boxes an access shares an element with. */
static int meet(State *s, i32 first, const Box *box) {
    for (i32 at = first; at >= 0; at = s->seen[at].next) {
        if (!same(&s->seen[at].box, box) && !overlap(&s->seen[at].box, box)) continue;
        if (s->num_found == s->room_found) {
            i64 room = s->room_found ? 2 * s->room_found : 64;
            i32 *more = realloc(s->found, (size_t)room * sizeof *more);
            if (!more) return 0;
            s->found = more;
            s->room_found = room;
        }
        s->found[s->num_found++] = s->seen[at].op;
    }
    return 1;
}

/* Take from a list what a write leaves nothing of. */
static void cover(State *s, i32 *at, const Box *box, int all) {
    while (*at >= 0) {
        Seen *one = &s->seen[*at];
        if (all || covers(box, &one->box)) {
            i32 gone = *at;
            *at = one->next;
            one->next = s->free;
            s->free = gone;
        } else at = &one->next;
    }
}

static int put(State *s, i32 *first, i32 op, const Box *box) {
    i32 at = s->free;
    if (at >= 0) s->free = s->seen[at].next;
    else {
        if (s->num_seen == s->room_seen) {
            i64 room = s->room_seen ? 2 * s->room_seen : 1024;
            Seen *more = room <= INT32_MAX ? realloc(s->seen, (size_t)room * sizeof *more) : NULL;
            if (!more) return 0;
            s->seen = more;
            s->room_seen = room;
        }
        at = (i32)s->num_seen++;
    }
    s->seen[at] = (Seen){op, *first, *box};
    *first = at;
    return 1;
}

/* Know what was known when an op began, and that it has ended. */
static void learn(i32 *clock, const i32 *known, const i32 *stream, i64 num_streams, i32 op) {
    const i32 *then = known + (i64)op * num_streams;
    for (i64 k = 0; k < num_streams; k++)
        if (clock[k] < then[k]) clock[k] = then[k];
    if (clock[stream[op]] < op) clock[stream[op]] = op;
}

static void wait_for(Found *out, i32 op) {
    if (out->num_waits < out->waits_room) out->waits[out->num_waits] = op;
    out->num_waits++;
}

static int derive_op(const Program *p, Found *out, State *s, i64 i) {
    const Access *first = p->accesses + (i ? p->access_ends[i - 1] : 0), *end = p->accesses + p->access_ends[i];
    s->num_found = 0;
    for (const Access *a = first; a < end; a++)
        if (!meet(s, s->writers[a->buffer], &a->box) || (a->writes && !meet(s, s->readers[a->buffer], &a->box))) return 0;
    for (const Access *a = first; a < end; a++)
        if (!a->writes && !put(s, &s->readers[a->buffer], (i32)i, &a->box)) return 0;
    for (const Access *a = first; a < end; a++) {
        if (!a->writes) continue;
        int all = same(&p->whole[a->buffer], &a->box);
        cover(s, &s->writers[a->buffer], &a->box, all);
        cover(s, &s->readers[a->buffer], &a->box, all);
        if (!put(s, &s->writers[a->buffer], (i32)i, &a->box)) return 0;
    }
    if (s->num_found > 1) qsort(s->found, (size_t)s->num_found, sizeof *s->found, upwards);
    i64 kept = 0;
    for (i64 k = 0; k < s->num_found; k++)
        if (!kept || s->found[kept - 1] != s->found[k]) s->found[kept++] = s->found[k];
    for (i64 k = 0; k < kept; k++, out->num_data++)
        if (out->num_data < out->data_room) out->data[out->num_data] = s->found[k];

    i64 streams = p->num_streams;
    i32 *clock = out->known + i * streams, own = p->stream[i];
    memcpy(clock, s->host, (size_t)streams * sizeof *clock);
    if (s->last[own] >= 0) learn(clock, out->known, p->stream, streams, s->last[own]);
    if (p->is_sync[i]) {
        for (i32 k = i ? p->sync_ends[i - 1] : 0; k < p->sync_ends[i]; k++) {
            i32 other = s->last[p->sync_streams[k]];
            if (other < 0) continue;
            wait_for(out, other);
            learn(clock, out->known, p->stream, streams, other);
        }
        memcpy(s->host, clock, (size_t)streams * sizeof *clock);
    } else
        for (i64 k = kept - 1; k >= 0; k--)
            if (clock[p->stream[s->found[k]]] < s->found[k]) {
                wait_for(out, s->found[k]);
                learn(clock, out->known, p->stream, streams, s->found[k]);
            }
    s->last[own] = (i32)i;
    out->data_ends[i] = (i32)out->num_data;
    out->waits_ends[i] = (i32)out->num_waits;
    return 1;
}

static i32 *none(i64 count) {
    i32 *array = malloc((size_t)(count ? count : 1) * sizeof *array);
    if (array) memset(array, -1, (size_t)count * sizeof *array);
    return array;
}

/* Fill what is found. Where there are more data or waits than room, their numbers say how much is needed. */
i32 derive(const Program *p, Found *out) {
    State s = {none(p->num_buffers), none(p->num_buffers), none(p->num_streams), none(p->num_streams),
               NULL, 0, 0, -1, NULL, 0, 0};
    int fine = s.writers && s.readers && s.last && s.host;
    out->num_data = out->num_waits = 0;
    for (i64 i = 0; fine && i < p->num_ops; i++) fine = derive_op(p, out, &s, i);
    free(s.writers); free(s.readers); free(s.last); free(s.host); free(s.seen); free(s.found);
    return fine ? DERIVED : OUT_OF_MEMORY;
}
