/* Plays a schedule from flat arrays: the events of sim/engine/play/simulate.py and network.py, in their order, with their
 * floating-point operations in their order, so that all times are equal to the last bit. What is given is never written
 * to, and what changes lies in State, so any number of threads may play one schedule at once.
 *
 * Ops, waits, transfers and groups of all ranks are numbered through. An activity is a range of phases, a phase a range
 * of demands; activities of kernels name the compute units and the memory of the rank that runs them.
 *
 * Compiled with -DWORLDS=n it carries n other machines along, whose figures are near those of the first (worlds.py). All
 * have its events in its order, and times of their own: what waits for several things goes on with the last of them in
 * each, and a flow is slowed by the resource that slows it here, at the rate that this has there. Plural names are theirs.
 * By default there are none, and nothing is left of them. */
#ifndef WORLDS
#define WORLDS 0
#endif
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int32_t i32;
typedef int64_t i64;
typedef uint8_t u8;
typedef double f64;
typedef struct { f64 of[WORLDS]; } Worlds;
#define EACH(k) for (int k = 0; k < WORLDS; k++)

enum { KERNEL, HOST_SYNC, EXCHANGE, COLLECTIVE, HOST_COPY, HOST_KERNEL };  /* kinds of ops, as in facts.py */
enum { WAIT, LATENCY, FLOW };                                 /* kinds of phases, as in activities.py */
enum { OWN_COMPUTE = -2, OWN_MEMORY = -3 };                   /* resources of the rank that runs an activity */
enum { RESUME, PHASE, END, SETTLE, PARTED };                  /* what an event calls */
enum { PLAYED, STANDSTILL, OUT_OF_MEMORY, UNKNOWN };          /* what play returns */
static const f64 SLACK = 1.0 + 1e-9, SAME = 1.0 + 1e-12;      /* as in network.py */

typedef struct { i32 stream, kind, issue, behind, group, waits, waits_end, transfers, transfers_end; } Op;
typedef struct { i32 ops, ops_end, rank, own; } Stream;       /* own: compute or host, which nothing hands over to */
typedef struct { i32 source, target; } Transfer;
typedef struct { i32 members, members_end; } Group;
typedef struct { i32 ops, ops_end, compute_stream; } Program;
typedef struct { i32 kind, resource, demands, demands_end; f64 seconds, late; } Phase;
typedef struct { i32 resource, unused; f64 amount; } Demand;
typedef struct { i32 compute, memory; } Device;

typedef struct {                                              /* what a schedule says */
    i64 num_ranks, num_ops, num_streams, num_transfers, num_groups;
    const Program *programs; const Op *ops; const Stream *streams; const Transfer *transfers; const Group *groups;
    const i32 *stream_ops, *waits, *transfers_of, *members;
} Score;

typedef struct {                                              /* what a machine makes of it */
    i64 num_resources, num_activities, cuda, handoff, one_queue;
                                                              /* handoff: an activity, or -1; one_queue: whether kernels
                                                                 begin behind all communication issued before them */
    const f64 *capacity; const i32 *activities; const Phase *phases; const Demand *demands; const Device *devices;
    const i32 *op_activity, *transfer_activity, *group_activity;
    const f64 *hold, *transfer_threads, *group_threads, *issue_s, *stretch;
                                                              /* hold: per op the compute units that it holds while it
                                                                 communicates; threads: per transfer and group the cores that
                                                                 each way of a rank takes meanwhile; per kind of issue; NULL
                                                                 or a factor per op */
    const Worlds *seconds, *amounts, *capacities, *issues;    /* of other worlds: per phase, demand, resource, kind of issue */
} Costs;

/* Where a stream stands in its op; each step ends where the stream may have to wait. */
enum { ISSUE, ISSUED, DEPENDENCIES, HANDOFF, POST, GRANTED, WORKING, COMMUNICATING };

typedef struct { i32 at, step, wait, next_waiting, next_queued; f64 asleep_s, issued_s; Worlds readies, dues; } StreamState;
typedef struct { i32 after, first, last, missing, resumes, launching; f64 since_s; Worlds sinces, grants, arrivals, ends; } OpState;
/* after: the op that the host waited for last before this one; since_s: the time of issuing since then; first, last:
 * streams that wait for its end; launching: the stream whose kernel begins behind it; missing: transfers to come; resumes: whether its stream waits for them; arrivals: the last of those that
 * have come */
typedef struct { i32 activity, phase, node, nodes, fills, lacks, mark, room, next_spare; i64 number, timer; f64 left_s, speed, last_s, found, late, held_s; Worlds lefts, speeds, lasts, founds, dues, helds; } Running;
/* lacks: whether less was free of what it fills than it demands; held_s: for how long some had been held by then */
typedef struct { i32 resource, user, before, after; f64 amount; const Worlds *amounts; } Node;
typedef struct { i32 first, last, users, fillers, queue, queue_end, mark, rising; u8 dirty, tight; f64 load, limit, held, left, asked, holding_s, since_s; Worlds lefts, askeds, filled, freed, grants, holdings, sinces; } Resource;
/* filled, freed: when something last began to fill it, and ended that; grants: the last hold; holding_s: for how long
 * some of it has been held, up to since_s */
typedef struct { f64 at; i64 serial; i32 call, subject; } Event;
typedef struct { i64 serial; i32 call, subject; } Soon;

typedef struct {
    const Score *score; const Costs *costs;
    f64 now, *posted, *begun, *ended, *granted;
    StreamState *streams; OpState *ops; Running *running; Node *nodes; Resource *resources;
    i32 *slot, *spare; i64 num_running, running_room, num_nodes, node_room;
                                                              /* slot: by user its place in running, -1 for a transfer or
                                                                 group that is not under way; spare: by the number of nodes
                                                                 that a place has the first that is free */
    u8 *offered; i32 *absent, *last_member, *width;
    i32 *moving; f64 *threads;                                /* per rank and way: what moves, and cores that it takes */
    Event *heap; i64 heap_size, heap_room;
    Soon *soon; i64 soon_first, soon_count, soon_room;        /* room is a power of two */
    i32 *reached, *flows, *full; i64 num_dirty;
    i64 serial, created, events; i32 stamp; int failed;
    Worlds nows, settles, latest, turns;                      /* of what happens; of the next settling; of the last end;
                                                                 whether SMs go to others first than here */
} State;

#define RUNNING(s, u) (&(s)->running[(s)->slot[u]])
#define AHEAD 6                                               /* ops of a stream that are fetched before their turn */

static void run_on(State *s, i32 u);
static void resume(State *s, i32 n);

static void no_earlier(Worlds *times, const Worlds *than) {
    EACH(k) if (times->of[k] < than->of[k]) times->of[k] = than->of[k];
}

/* The clock: a heap of times, and a queue of what follows at this moment */

static void soon(State *s, i32 call, i32 subject, i64 serial) {
    if (s->soon_count == s->soon_room) {
        i64 room = 2 * s->soon_room;
        Soon *wider = malloc((size_t)room * sizeof *wider);
        if (!wider) { s->failed = OUT_OF_MEMORY; return; }
        for (i64 i = 0; i < s->soon_count; i++) wider[i] = s->soon[(s->soon_first + i) & (s->soon_room - 1)];
        free(s->soon);
        s->soon = wider; s->soon_first = 0; s->soon_room = room;
    }
    s->soon[(s->soon_first + s->soon_count++) & (s->soon_room - 1)] = (Soon){serial, call, subject};
}

static int earlier(Event a, Event b) { return a.at < b.at || (a.at == b.at && a.serial < b.serial); }

static void push(State *s, Event e) {
    if (s->heap_size == s->heap_room) {
        Event *wider = realloc(s->heap, (size_t)s->heap_room * 2 * sizeof *wider);
        if (!wider) { s->failed = OUT_OF_MEMORY; return; }
        s->heap = wider; s->heap_room *= 2;
    }
    Event *h = s->heap;
    i64 i = s->heap_size++;
    for (i64 p; i > 0 && earlier(e, h[p = (i - 1) / 2]); i = p) h[i] = h[p];
    h[i] = e;
}

static Event pop(State *s) {
    Event *h = s->heap, top = h[0];
    i64 n = --s->heap_size, i = 0;
    Event e = h[n];
    for (i64 c; (c = 2 * i + 1) < n; i = c) {
        if (c + 1 < n && earlier(h[c + 1], h[c])) c++;
        if (!earlier(h[c], e)) break;
        h[i] = h[c];
    }
    h[i] = e;
    return top;
}

static void resume_soon(State *s, i32 n, const Worlds *dues) {
    s->streams[n].dues = *dues;
    soon(s, RESUME, n, 0);
}

static i64 start(State *s, f64 seconds, i32 call, i32 subject) {
    i64 serial = s->serial++;
    if (s->now + seconds > s->now) push(s, (Event){s->now + seconds, serial, call, subject});
    else soon(s, call, subject, serial);
    return serial;
}

/* The network: flows on resources, see network.py */

static int overloaded(const Resource *r) { return r->load > r->limit; }
static f64 free_of(const State *s, i32 r) { return s->costs->capacity[r] - s->resources[r].held; }

/* Return the resource that a phase of user u names. Only streams run activities that name their rank's own. */
static i32 located(const State *s, i32 u, i32 resource) {
    if (resource > OWN_COMPUTE) return resource;
    const Device *device = &s->costs->devices[s->score->streams[u].rank];
    return resource == OWN_COMPUTE ? device->compute : device->memory;
}

static void set_speed(State *s, i32 u, f64 speed, const Worlds *speeds) {
    Running *x = RUNNING(s, u);
    x->left_s -= (s->now - x->last_s) * x->speed;
    x->last_s = s->now;
    x->speed = speed;
    EACH(k) {
        x->lefts.of[k] -= (s->nows.of[k] - x->lasts.of[k]) * x->speeds.of[k];
        x->lasts.of[k] = s->nows.of[k];
        x->speeds.of[k] = speeds->of[k] > 0 ? speeds->of[k] : speed;
        x->dues.of[k] = s->nows.of[k] + (speed > 0 ? x->lefts.of[k] / x->speeds.of[k] : 0.0);
    }
    x->timer = -1;                                            /* a timer that is under way passes without a call */
    if (speed > 0) x->timer = start(s, (x->left_s > 0.0 ? x->left_s : 0.0) / speed, END, u);
}

static void settle_soon(State *s, i32 r) {
    if (!s->num_dirty) { soon(s, SETTLE, 0, 0); s->settles = s->nows; }
    no_earlier(&s->settles, &s->nows);
    if (!s->resources[r].dirty) { s->resources[r].dirty = 1; s->reached[s->num_dirty++] = r; }
}

static Worlds alike(f64 value) {
    Worlds all;
    EACH(k) all.of[k] = value;
    return all;
}

static void adjust(State *s, i32 u) {
    Running *x = RUNNING(s, u);
    f64 speed = 1.0;
    Worlds speeds = alike(1.0);
    int alone = 1;
    for (Node *n = s->nodes + x->node, *end = n + x->nodes; n < end && alone; n++) {
        Resource *r = &s->resources[n->resource];
        if (!overloaded(r)) continue;
        if (r->users > 1) alone = 0;
        else {
            f64 share = free_of(s, n->resource) / n->amount;
            if (share < speed) speed = share;
            EACH(k) {
                f64 theirs = (s->costs->capacities[n->resource].of[k] - r->held) / n->amounts->of[k];
                if (theirs < speeds.of[k]) speeds.of[k] = theirs;
            }
        }
    }
    if (alone) { set_speed(s, u, speed, &speeds); return; }
    for (Node *n = s->nodes + x->node, *end = n + x->nodes; n < end; n++)
        if (overloaded(&s->resources[n->resource])) settle_soon(s, n->resource);
}

/* Return for how long something of a resource has been held up to now; set *theirs to the same of other worlds. */
static f64 held_for(const State *s, const Resource *r, Worlds *theirs) {
    EACH(k) theirs->of[k] = r->holdings.of[k] + (r->held > 0 ? s->nows.of[k] - r->sinces.of[k] : 0.0);
    return r->holding_s + (r->held > 0 ? s->now - r->since_s : 0.0);
}

static void start_flow(State *s, i32 u, const Phase *p, f64 factor) {
    Running *x = RUNNING(s, u);
    x->late = p->late; x->lacks = 0;
    x->number = ++s->created;
    x->left_s = p->seconds * factor; x->speed = 0.0; x->last_s = s->now; x->timer = -1;
    EACH(k) {
        x->lefts.of[k] = s->costs->seconds[p - s->costs->phases].of[k] * factor;
        x->speeds.of[k] = 0.0;
        x->lasts.of[k] = s->nows.of[k];
    }
    x->fills = p->resource == -1 ? -1 : located(s, u, p->resource);
    if (x->fills >= 0) {
        Resource *r = &s->resources[x->fills];
        r->fillers++;
        EACH(k) if (s->nows.of[k] < r->grants.of[k]) s->turns.of[k] = 1.0;
        r->filled = s->nows;
    }
    x->nodes = p->demands_end - p->demands;
    int contended = 0;
    i32 at = x->node;
    for (const Demand *d = s->costs->demands + p->demands, *end = s->costs->demands + p->demands_end; d < end; d++, at++) {
        i32 number = located(s, u, d->resource);
        Resource *r = &s->resources[number];
        f64 amount = d->amount;
        if (p->late > 0 && number == x->fills && amount > free_of(s, number)) {
            x->late *= amount - free_of(s, number);
            if (x->late > 1.0) x->late = 1.0;
            amount = free_of(s, number);
            x->lacks = 1;
            x->held_s = held_for(s, r, &x->helds);
        }
        s->nodes[at] = (Node){number, u, r->last, -1, amount, WORLDS ? &s->costs->amounts[d - s->costs->demands] : 0};
        if (r->last >= 0) s->nodes[r->last].after = at; else r->first = at;
        r->last = at;
        r->users++;
        r->load += amount;
        contended |= overloaded(r);
    }
    Worlds whole = alike(1.0);
    if (contended) adjust(s, u); else set_speed(s, u, 1.0, &whole);
}

static int grants(const State *s, i32 r, f64 amount) {
    return !s->resources[r].fillers && s->resources[r].held + amount < s->costs->capacity[r];
}

static void change_hold(State *s, i32 r, f64 amount) {
    Resource *x = &s->resources[r];
    int before = overloaded(x);
    x->holding_s = held_for(s, x, &x->holdings);
    x->since_s = s->now; x->sinces = s->nows;
    x->held += amount;
    x->limit = free_of(s, r) * SLACK;
    if (before || overloaded(x)) {
        if (x->users == 1) adjust(s, s->nodes[x->first].user); else settle_soon(s, r);
    }
}

/* Threads of TCP take cores off the top while bytes of a rank move that way, however many messages they are of. */
enum { OUT, IN };

static void begin_moving(State *s, i32 number, int way, f64 cores) {
    i32 rank = s->score->streams[s->score->ops[number].stream].rank, at = 2 * rank + way;
    if (cores <= 0 || s->moving[at]++) return;
    change_hold(s, s->costs->devices[rank].compute, s->threads[at] = cores);
}

static void end_moving(State *s, i32 number, int way, f64 cores) {
    i32 rank = s->score->streams[s->score->ops[number].stream].rank, at = 2 * rank + way;
    if (cores <= 0 || --s->moving[at]) return;
    change_hold(s, s->costs->devices[rank].compute, -s->threads[at]);
}

/* Return the compute units that the op of stream n holds while it communicates. */
static f64 held_by(const State *s, i32 n) { return s->costs->hold[s->score->stream_ops[s->streams[n].at]]; }

static void serve(State *s, i32 r) {
    Resource *x = &s->resources[r];
    while (x->queue >= 0 && grants(s, r, held_by(s, x->queue))) {
        i32 n = x->queue;
        x->queue = s->streams[n].next_queued;
        change_hold(s, r, held_by(s, n));
        resume_soon(s, n, &s->nows);
    }
}

static void finish(State *s, i32 u) {
    Running *x = RUNNING(s, u);
    x->timer = -1;
    for (i32 at = x->node, end = at + x->nodes; at < end; at++) {
        Node *n = &s->nodes[at];
        Resource *r = &s->resources[n->resource];
        if (r->users == 1) { r->users = 0; r->first = r->last = -1; r->load = 0.0; continue; }
        if (overloaded(r)) settle_soon(s, n->resource);
        if (n->before >= 0) s->nodes[n->before].after = n->after; else r->first = n->after;
        if (n->after >= 0) s->nodes[n->after].before = n->before; else r->last = n->before;
        r->users--;
        r->load -= n->amount;
    }
    if (x->fills >= 0) { s->resources[x->fills].fillers--; s->resources[x->fills].freed = s->nows; serve(s, x->fills); }
    if (!x->lacks) { run_on(s, u); return; }
    Worlds helds;
    f64 held_s = held_for(s, &s->resources[x->fills], &helds) - x->held_s;
    EACH(k) {
        f64 theirs = helds.of[k] - x->helds.of[k];
        x->dues.of[k] = s->nows.of[k] + (theirs > 0 ? theirs : 0.0) * x->late;
    }
    start(s, held_s * x->late, PHASE, u);
}

static i64 number_of(State *s, i32 item, int flows) { return flows ? RUNNING(s, item)->number : item; }

/* Sort flows by number, or resources, with Shell's gaps: few need none, and qsort's calls took a seventh of a play. */
static void sort(State *s, i32 *items, i32 count, int flows) {
    i32 gap = 1;
    while (gap < count / 9) gap = 3 * gap + 1;
    for (; gap > 0; gap /= 3)
        for (i32 i = gap; i < count; i++) {
            i32 x = items[i], j = i;
            i64 own = number_of(s, x, flows);
            for (; j >= gap && own < number_of(s, items[j - gap], flows); j -= gap) items[j] = items[j - gap];
            items[j] = x;
        }
}

/* Find the flows that hang together with changed resources through overloaded ones; return how many there are, and set
 * *num_full to the number of overloaded resources. */
static i32 component(State *s, i32 *num_full) {
    i32 stamp = ++s->stamp, top = (i32)s->num_dirty, num_flows = 0, found = 0;
    i32 *reached = s->reached, *flows = s->flows, *full = s->full;
    s->num_dirty = 0;
    for (i32 k = 0; k < top; k++) { s->resources[reached[k]].dirty = 0; s->resources[reached[k]].mark = stamp; }
    for (i32 k = 0; k < top; k++) {
        Resource *r = &s->resources[reached[k]];
        if (overloaded(r)) full[found++] = reached[k];
        for (i32 n = r->first; n >= 0; n = s->nodes[n].after) {
            Running *x = RUNNING(s, s->nodes[n].user);
            if (x->mark == stamp) continue;
            x->mark = stamp;
            x->found = -1.0;                                  /* still rising */
            x->founds = alike(1.0);
            flows[num_flows++] = s->nodes[n].user;
            for (Node *m = s->nodes + x->node, *end = m + x->nodes; m < end; m++) {
                Resource *q = &s->resources[m->resource];
                if (q->mark != stamp && overloaded(q)) { q->mark = stamp; reached[top++] = m->resource; }
            }
        }
    }
    sort(s, flows, num_flows, 1);
    sort(s, full, found, 0);
    *num_full = found;
    return num_flows;
}

static f64 level_of(const Resource *r) { return (r->left > 0.0 ? r->left : 0.0) / r->asked; }

/* Raise all speeds together until resources are full; their users stop there, the others go on. */
static void fill(State *s, i32 num_full) {
    i32 *full = s->full;
    for (i32 i = 0; i < num_full; i++) {
        Resource *r = &s->resources[full[i]];
        r->left = free_of(s, full[i]);
        r->asked = r->load;
        r->rising = r->users;
        EACH(k) { r->lefts.of[k] = s->costs->capacities[full[i]].of[k] - r->held; r->askeds.of[k] = 0.0; }
        for (i32 n = r->first; WORLDS && n >= 0; n = s->nodes[n].after)
            EACH(k) r->askeds.of[k] += s->nodes[n].amounts->of[k];
    }
    while (num_full) {
        f64 level = HUGE_VAL;
        for (i32 k = 0; k < num_full; k++) {
            Resource *r = &s->resources[full[k]];
            if (r->asked > 0.0 && level_of(r) < level) level = level_of(r);
        }
        if (level >= 1.0) break;
        for (i32 k = 0; k < num_full; k++) {
            Resource *r = &s->resources[full[k]];
            r->tight = r->asked > 0.0 && level_of(r) <= level * SAME;
        }
        for (i32 k = 0; k < num_full; k++) {
            Resource *r = &s->resources[full[k]];
            if (!r->tight || !r->rising) continue;
            r->rising = 0;
            Worlds levels;
            EACH(w) {
                f64 theirs = r->lefts.of[w] / r->askeds.of[w];
                levels.of[w] = theirs < 1.0 ? theirs : 1.0;
            }
            for (i32 n = r->first; n >= 0; n = s->nodes[n].after) {
                Running *x = RUNNING(s, s->nodes[n].user);
                if (x->found >= 0) continue;
                x->found = level;
                x->founds = levels;
                for (Node *m = s->nodes + x->node, *end = m + x->nodes; m < end; m++) {
                    Resource *q = &s->resources[m->resource];
                    if (q->rising > 0) {
                        q->left -= m->amount * level; q->asked -= m->amount; q->rising--;
                        EACH(w) { q->lefts.of[w] -= m->amounts->of[w] * levels.of[w]; q->askeds.of[w] -= m->amounts->of[w]; }
                    }
                }
            }
        }
        i32 kept = 0;
        for (i32 k = 0; k < num_full; k++)
            if (s->resources[full[k]].rising) full[kept++] = full[k];
        num_full = kept;
    }
    for (i32 k = 0; k < num_full; k++) s->resources[full[k]].rising = 0;
}

static void settle(State *s) {
    i32 num_full, num_flows = component(s, &num_full);
    fill(s, num_full);
    for (i32 k = 0; k < num_flows; k++) {
        Running *x = RUNNING(s, s->flows[k]);
        f64 speed = x->found < 0 ? 1.0 : x->found;
        if (speed != x->speed) set_speed(s, s->flows[k], speed, &x->founds);
    }
}

/* How often b > 0 goes into a: Python's a // b, which floor(a / b) is not (1.0 // 0.1 is 9). Only its sign matters below 0. */
static f64 whole(f64 a, f64 b) {
    f64 quotient = (a - fmod(a, b)) / b, down = floor(quotient);
    return quotient - down > 0.5 ? down + 1 : down;
}

/* Activities: those of streams, of transfers, of groups, in this order of their users */

static void leave_place(State *s, i32 u) {
    Running *x = RUNNING(s, u);
    x->next_spare = s->spare[x->room];
    s->spare[x->room] = s->slot[u];
    s->slot[u] = -1;
}

static void then(State *s, i32 u) {
    i32 streams = (i32)s->score->num_streams, transfers = (i32)s->score->num_transfers;
    if (u < streams) { resume_soon(s, u, &s->nows); return; }
    RUNNING(s, u)->dues = s->nows;
    if (u - streams >= transfers) { soon(s, PARTED, u - streams - transfers, 0); return; }
    leave_place(s, u);
    u -= streams;
    i32 sides[2] = {s->score->transfers[u].source, s->score->transfers[u].target};
    for (int k = OUT; k <= IN; k++) end_moving(s, sides[k], k, s->costs->transfer_threads[u]);
    for (int k = 0; k < 2; k++) {
        OpState *x = &s->ops[sides[k]];
        no_earlier(&x->arrivals, &s->nows);
        if (--x->missing == 0 && x->resumes) { x->resumes = 0; resume_soon(s, s->score->ops[sides[k]].stream, &x->arrivals); }
    }
}

/* Return the factor of user u's op in one of its steps: a kernel's is of its work, another op's of what hands it over. */
static f64 stretched(const State *s, i32 u, i32 step) {
    if (!s->costs->stretch || u >= s->score->num_streams || s->streams[u].step != step) return 1.0;
    i32 number = s->score->stream_ops[s->streams[u].at];
    return (step == WORKING) == (s->score->ops[number].kind == KERNEL) ? s->costs->stretch[number] : 1.0;
}

static void run_on(State *s, i32 u) {
    Running *x = RUNNING(s, u);
    const Costs *c = s->costs;
    while (x->phase < c->activities[x->activity + 1]) {
        const Phase *p = &c->phases[x->phase++];
        f64 seconds = p->seconds, factor = 1.0;
        switch (p->kind) {
        case FLOW:
            start_flow(s, u, p, stretched(s, u, WORKING));
            return;
        case WAIT: {
            i32 r = located(s, u, p->resource);
            seconds *= factor = whole(s->resources[r].load * SLACK, free_of(s, r));
            break;
        }
        case LATENCY: seconds *= factor = stretched(s, u, POST); break;
        default: s->failed = UNKNOWN; return;
        }
        if (seconds > 0) {
            EACH(k) x->dues.of[k] = s->nows.of[k] + c->seconds[p - c->phases].of[k] * factor;
            start(s, seconds, PHASE, u);
            return;
        }
    }
    then(s, u);
}

/* Give a transfer or group a place; what points into running or nodes is void afterwards. */
static void take_place(State *s, i32 u, i32 width) {
    i32 at = s->spare[width];
    if (at >= 0) s->spare[width] = s->running[at].next_spare;
    else {
        if (s->num_running == s->running_room) {
            Running *wider = realloc(s->running, (size_t)(2 * s->running_room) * sizeof *wider);
            if (!wider) { s->failed = OUT_OF_MEMORY; return; }
            s->running = wider; s->running_room *= 2;
        }
        if (s->num_nodes + width > s->node_room) {
            i64 room = 2 * s->node_room + width;
            Node *wider = room <= INT32_MAX ? realloc(s->nodes, (size_t)room * sizeof *wider) : 0;
            if (!wider) { s->failed = OUT_OF_MEMORY; return; }
            s->nodes = wider; s->node_room = room;
        }
        at = (i32)s->num_running++;
        memset(&s->running[at], 0, sizeof *s->running);
        s->running[at].room = width;
        s->running[at].node = (i32)s->num_nodes;
        s->num_nodes += width;
    }
    s->slot[u] = at;
}

static void begin(State *s, i32 u, i32 activity) {
    if (s->slot[u] < 0) take_place(s, u, s->width[activity]);
    if (s->failed) return;
    RUNNING(s, u)->activity = activity;
    RUNNING(s, u)->phase = s->costs->activities[activity];
    run_on(s, u);
}

/* Streams: each takes its ops in order */

static void wait_for(State *s, i32 op, i32 n) {
    OpState *x = &s->ops[op];
    s->streams[n].next_waiting = -1;
    if (x->first < 0) x->first = n; else s->streams[x->last].next_waiting = n;
    x->last = n;
}

/* Take the compute units that the op of stream n holds; return 0 if it has to queue for them. */
static int hold(State *s, i32 n, i32 resource) {
    Resource *r = &s->resources[resource];
    f64 amount = held_by(s, n);
    if (r->queue < 0 && grants(s, resource, amount)) {
        EACH(k) if (s->nows.of[k] < r->freed.of[k]) s->turns.of[k] = 1.0;
        no_earlier(&r->grants, &s->nows);
        change_hold(s, resource, amount);
        return 1;
    }
    EACH(k) if (s->nows.of[k] < r->filled.of[k]) s->turns.of[k] = 1.0;
    s->streams[n].next_queued = -1;
    if (r->queue < 0) r->queue = n; else s->streams[r->queue_end].next_queued = n;
    r->queue_end = n;
    return 0;
}

/* Start the transfers whose other side is there; return whether the exchange has to wait for any. */
static int exchange(State *s, i32 number) {
    const Score *m = s->score;
    Worlds nows = s->nows;
    for (i32 k = m->ops[number].transfers; k < m->ops[number].transfers_end; k++) {
        i32 t = m->transfers_of[k], source = m->transfers[t].source, target = m->transfers[t].target;
        if (!s->offered[t]) { s->offered[t] = 1; continue; }
        s->begun[source] = s->begun[target] = s->now;
        no_earlier(&s->nows, &s->ops[source == number ? target : source].grants);
        begin_moving(s, source, OUT, s->costs->transfer_threads[t]);
        begin_moving(s, target, IN, s->costs->transfer_threads[t]);
        begin(s, (i32)m->num_streams + t, s->costs->transfer_activity[t]);
        s->nows = nows;
    }
    return s->ops[number].resumes = s->ops[number].missing > 0;
}

/* Begin a collective if this is the last of its members. */
static void collective(State *s, i32 number) {
    const Score *m = s->score;
    i32 g = m->ops[number].group;
    if (--s->absent[g]) return;
    for (i32 k = m->groups[g].members; k < m->groups[g].members_end; k++) {
        s->begun[m->members[k]] = s->now;
        no_earlier(&s->nows, &s->ops[m->members[k]].grants);
        for (int way = OUT; way <= IN; way++) begin_moving(s, m->members[k], way, s->costs->group_threads[g]);
    }
    s->last_member[g] = number;
    begin(s, (i32)(m->num_streams + m->num_transfers) + g, s->costs->group_activity[g]);
}

static void end_op(State *s, i32 number) {
    s->ended[number] = s->now;
    s->ops[number].ends = s->nows;
    no_earlier(&s->latest, &s->nows);
    for (i32 n = s->ops[number].first; n >= 0; n = s->streams[n].next_waiting) resume_soon(s, n, &s->nows);
    s->ops[number].first = -1;
}

/* Return whether ops of a kind concern one rank alone, and take time. */
static int is_activity(i32 kind) { return kind == KERNEL || kind == HOST_COPY || kind == HOST_KERNEL; }

/* Ask for the memory of an op, of which streams of many ranks take turns. */
static void fetch(const State *s, i32 number) {
    __builtin_prefetch(&s->score->ops[number]);
    __builtin_prefetch(&s->costs->op_activity[number]);
    __builtin_prefetch(&s->costs->hold[number]);
    __builtin_prefetch(&s->ops[number], 1);
    __builtin_prefetch(&s->posted[number], 1);
    __builtin_prefetch(&s->begun[number], 1);
    __builtin_prefetch(&s->ended[number], 1);
    __builtin_prefetch(&s->granted[number], 1);
}

/* Return the last communication, of what was issued since the kernel before a kernel, that has not its compute units yet;
 * -1 where all has. */
static i32 not_launched(State *s, i32 number, i32 first) {
    for (i32 ahead = number - 1; ahead >= first && s->score->ops[ahead].kind != KERNEL; ahead--) {
        i32 kind = s->score->ops[ahead].kind;
        if (kind != EXCHANGE && kind != COLLECTIVE) continue;
        if (s->granted[ahead] < 0) return ahead;
        no_earlier(&s->nows, &s->ops[ahead].grants);
    }
    return -1;
}

static void resume(State *s, i32 n) {
    const Score *m = s->score;
    const Costs *c = s->costs;
    const Stream *stream = &m->streams[n];
    StreamState *x = &s->streams[n];
    i32 compute = c->devices[stream->rank].compute;
    f64 now = s->now;
    for (; x->at < stream->ops_end; x->at++, x->step = ISSUE) {
        i32 number = m->stream_ops[x->at], after = s->ops[number].after;
        const Op *op = &m->ops[number];
        switch (x->step) {
        case ISSUE:
            if (x->at + AHEAD < stream->ops_end) fetch(s, m->stream_ops[x->at + AHEAD]);
            x->asleep_s = now;
            x->readies = s->nows;
            if (after >= 0 && s->ended[after] < 0) { x->step = ISSUED; wait_for(s, after, n); return; }
        /* fall through */
        case ISSUED:
            x->issued_s = s->ops[number].since_s;
            if (after >= 0) x->issued_s += s->ended[after];
            EACH(k) {
                f64 issued = s->ops[number].sinces.of[k] + (after >= 0 ? s->ops[after].ends.of[k] : 0.0);
                if (x->readies.of[k] < issued) x->readies.of[k] = issued;
            }
            x->wait = op->waits;
            if (x->issued_s > now) {
                x->step = DEPENDENCIES;
                x->dues = x->readies;
                start(s, x->issued_s - now, RESUME, n);
                return;
            }
        /* fall through */
        case DEPENDENCIES:
            x->step = DEPENDENCIES;
            no_earlier(&x->readies, &s->nows);
            while (x->wait < op->waits_end) {
                i32 other = m->waits[x->wait++];
                if (s->ended[other] < 0) { wait_for(s, other, n); return; }
                no_earlier(&x->readies, &s->ops[other].ends);
            }
            if (c->cuda && x->wait == op->waits_end && op->behind >= 0) {
                x->wait++;
                if (s->ended[op->behind] < 0) { wait_for(s, op->behind, n); return; }
                no_earlier(&x->readies, &s->ops[op->behind].ends);
            }
            s->nows = x->readies;
            if (c->handoff >= 0) {
                f64 since = x->asleep_s, issued = stream->own ? x->issued_s : 0.0;
                if (c->cuda ? !stream->own : now > (issued > since ? issued : since)) {
                    x->step = POST;
                    begin(s, n, (i32)c->handoff);
                    return;
                }
            }
        /* fall through */
        case POST:
            if (c->one_queue && op->kind == KERNEL) {
                i32 ahead = not_launched(s, number, m->programs[stream->rank].ops);
                no_earlier(&s->nows, &x->readies);
                if (ahead >= 0) {
                    x->step = POST;
                    x->readies = s->nows;
                    s->ops[ahead].launching = n;
                    return;
                }
            }
            s->posted[number] = s->begun[number] = now;
            if (is_activity(op->kind)) {
                s->granted[number] = now;
                x->step = WORKING;
                begin(s, n, c->op_activity[number]);
                return;
            }
            x->step = GRANTED;
            x->readies = s->nows;
            if (c->hold[number] > 0 && !hold(s, n, compute)) return;
        /* fall through */
        case GRANTED:
            x->step = COMMUNICATING;
            s->granted[number] = now;
            no_earlier(&s->nows, &x->readies);
            s->ops[number].grants = s->nows;
            if (s->ops[number].launching >= 0) {
                resume_soon(s, s->ops[number].launching, &s->nows);
                s->ops[number].launching = -1;
            }
            if (op->kind == EXCHANGE && exchange(s, number)) return;
            if (op->kind == COLLECTIVE) { collective(s, number); return; }
        /* fall through */
        case COMMUNICATING:
            no_earlier(&s->nows, &s->ops[number].arrivals);
            if (c->hold[number] > 0) { change_hold(s, compute, -c->hold[number]); serve(s, compute); }
        /* fall through */
        case WORKING:
            end_op(s, number);
            break;
        default: s->failed = UNKNOWN; return;
        }
    }
}

static void parted(State *s, i32 g) {                         /* the member that began a collective goes on first */
    const Score *m = s->score;
    i32 last = s->last_member[g];
    for (i32 k = m->groups[g].members; k < m->groups[g].members_end; k++)
        for (int way = OUT; way <= IN; way++) end_moving(s, m->members[k], way, s->costs->group_threads[g]);
    for (i32 k = m->groups[g].members; k < m->groups[g].members_end; k++)
        if (m->members[k] != last) resume_soon(s, m->ops[m->members[k]].stream, &s->nows);
    resume(s, m->ops[last].stream);
}

static void fire(State *s, i32 call, i32 subject, i64 serial) {
    s->events++;
    switch (call) {
    case RESUME: s->nows = s->streams[subject].dues; resume(s, subject); break;
    case PHASE: s->nows = RUNNING(s, subject)->dues; run_on(s, subject); break;
    case END:
        if (s->slot[subject] < 0 || RUNNING(s, subject)->timer != serial) break;
        s->nows = RUNNING(s, subject)->dues;
        finish(s, subject);
        break;
    case SETTLE: s->nows = s->settles; settle(s); break;
    case PARTED:
        s->nows = RUNNING(s, s->score->num_streams + s->score->num_transfers + subject)->dues;
        leave_place(s, (i32)(s->score->num_streams + s->score->num_transfers) + subject);
        parted(s, subject);
        break;
    default: s->failed = UNKNOWN;
    }
}

/* Beginning and end */

static void *room(State *s, i64 count, size_t size) {
    void *found = calloc((size_t)count + 1, size);
    if (!found) s->failed = OUT_OF_MEMORY;
    return found;
}

static void set_issues(State *s) {                            /* when the host issues every op: simulate._issues */
    const Score *m = s->score;
    const Costs *c = s->costs;
    for (i64 r = 0; r < m->num_ranks; r++) {
        i32 after = -1;
        f64 since_s = 0.0;
        Worlds sinces = alike(0.0);
        for (i32 i = m->programs[r].ops; i < m->programs[r].ops_end; i++) {
            since_s += c->issue_s[m->ops[i].issue];
            s->ops[i].after = after;
            s->ops[i].since_s = since_s;
            EACH(k) s->ops[i].sinces.of[k] = sinces.of[k] += c->issues[m->ops[i].issue].of[k];
            if (m->ops[i].kind == HOST_SYNC || m->ops[i].kind == HOST_KERNEL ||
                (!c->cuda && m->ops[i].stream == m->programs[r].compute_stream)) {
                after = i;
                since_s = 0.0;
                sinces = alike(0.0);
            }
        }
    }
}

/* Give every stream nodes for the widest phase that one runs, and put it at its first op. */
static void set_up(State *s) {
    const Score *m = s->score;
    const Costs *c = s->costs;
    i64 nodes = 0;
    i32 widest = 0;
    for (i64 a = 0; a < c->num_activities; a++)
        for (i32 p = c->activities[a]; p < c->activities[a + 1]; p++) {
            i32 count = c->phases[p].demands_end - c->phases[p].demands;
            if (count > s->width[a]) s->width[a] = count;
            if (count > widest) widest = count;
        }
    s->spare = room(s, widest + 1, sizeof *s->spare);
    if (s->failed) return;
    for (i64 r = 0; r < c->num_resources; r++) {
        Resource *x = &s->resources[r];
        x->first = x->last = x->queue = -1;
        x->limit = c->capacity[r] * SLACK;
    }
    set_issues(s);
    i32 own = c->handoff >= 0 ? s->width[c->handoff] : 0;     /* of what streams run themselves */
    for (i64 i = 0; i < m->num_ops; i++) {
        s->posted[i] = s->begun[i] = s->ended[i] = s->granted[i] = -1.0;
        s->ops[i].first = s->ops[i].launching = -1;
        s->ops[i].missing = m->ops[i].transfers_end - m->ops[i].transfers;
        if (m->ops[i].kind < KERNEL || m->ops[i].kind > HOST_KERNEL) s->failed = UNKNOWN;
        if (is_activity(m->ops[i].kind) && s->width[c->op_activity[i]] > own) own = s->width[c->op_activity[i]];
    }
    for (i64 n = 0; n < m->num_streams; n++) {
        s->running[n].node = (i32)nodes;
        nodes += own;
        s->slot[n] = (i32)n;
        s->streams[n].at = m->streams[n].ops;
        soon(s, RESUME, (i32)n, 0);
    }
    for (i64 g = 0; g < m->num_groups; g++) s->absent[g] = m->groups[g].members_end - m->groups[g].members;
    for (i64 u = m->num_streams; u < m->num_streams + m->num_transfers + m->num_groups; u++) s->slot[u] = -1;
    for (i32 k = 0; k <= widest; k++) s->spare[k] = -1;
    s->num_running = m->num_streams;
    s->num_nodes = s->node_room = nodes;
    s->nodes = room(s, nodes, sizeof *s->nodes);
}

static void run(State *s) {
    while (!s->failed) {
        if (s->soon_count && !(s->heap_size && s->heap[0].at <= s->now)) {
            while (s->soon_count && !s->failed) {
                Soon x = s->soon[s->soon_first];
                s->soon_first = (s->soon_first + 1) & (s->soon_room - 1);
                s->soon_count--;
                fire(s, x.call, x.subject, x.serial);
            }
        } else if (s->heap_size) {
            Event e = pop(s);
            s->now = e.at;
            fire(s, e.call, e.subject, e.serial);
        } else return;
    }
}

/* Set the times of all ops, *events to the number of events, and *steps to the ends of the other worlds, if there are any;
 * return PLAYED or what went wrong. */
int play(const Score *m, const Costs *c, f64 *posted, f64 *begun, f64 *ended, f64 *granted, i64 *events, Worlds *steps) {
    State state = {.score = m, .costs = c, .posted = posted, .begun = begun, .ended = ended, .granted = granted}, *s = &state;
    i64 users = m->num_streams + m->num_transfers + m->num_groups;
    s->streams = room(s, m->num_streams, sizeof *s->streams);
    s->ops = room(s, m->num_ops, sizeof *s->ops);
    s->running_room = m->num_streams + 1024;
    s->running = room(s, s->running_room, sizeof *s->running);
    s->slot = room(s, users, sizeof *s->slot);
    s->resources = room(s, c->num_resources, sizeof *s->resources);
    s->offered = room(s, m->num_transfers, sizeof *s->offered);
    s->absent = room(s, m->num_groups, sizeof *s->absent);
    s->last_member = room(s, m->num_groups, sizeof *s->last_member);
    s->width = room(s, c->num_activities, sizeof *s->width);
    s->moving = room(s, 2 * m->num_ranks, sizeof *s->moving);
    s->threads = room(s, 2 * m->num_ranks, sizeof *s->threads);
    s->reached = room(s, c->num_resources, sizeof *s->reached);
    s->full = room(s, c->num_resources, sizeof *s->full);
    s->flows = room(s, users, sizeof *s->flows);
    s->heap = room(s, (s->heap_room = 1024), sizeof *s->heap);
    s->soon = room(s, (s->soon_room = 1024), sizeof *s->soon);
    if (!s->failed) set_up(s);
    if (!s->failed) run(s);
    for (i64 i = 0; i < m->num_ops && !s->failed; i++)
        if (ended[i] < 0) s->failed = STANDSTILL;
    *events = s->events;
    if (WORLDS) { steps[0] = s->latest; steps[1] = s->turns; }
    free(s->streams); free(s->ops); free(s->running); free(s->resources); free(s->offered); free(s->absent);
    free(s->last_member); free(s->width); free(s->reached); free(s->full); free(s->flows); free(s->heap); free(s->soon);
    free(s->nodes); free(s->slot); free(s->spare); free(s->moving); free(s->threads);
    return s->failed;
}
