/* Which row stands at a position, and which documents a packed row holds: order/permutation.py and pack/documents.py. */

#include <stdlib.h>

#include "kernel.h"

/* order/permutation.py, number by number: see there for what it does and why. */
#define GOLDEN 0x9E3779B97F4A7C15ULL
#define ROUNDS 8
#define SMALL 32

/* Rows that are prepared while others are looked up; see fetch_ahead. */
#define ROWS_AHEAD 8

static inline uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
    return value ^ (value >> 31);
}

static int64_t by_hash(uint64_t number, uint64_t size, uint64_t key) {
    uint64_t own = mix(key + number * GOLDEN);
    int64_t before = 0;
    for (uint64_t i = 0; i < size; i++) {
        uint64_t other = mix(key + i * GOLDEN);
        before += other < own || (other == own && i < number);
    }
    return before;
}

static inline uint64_t network(uint64_t number, uint64_t size, uint64_t key) {
    int bits = 64 - __builtin_clzll(size - 1), low_bits = bits / 2;
    uint64_t low_mask = (1ULL << low_bits) - 1, high_mask = (1ULL << (bits - low_bits)) - 1;
    uint64_t high = number >> low_bits, low = number & low_mask;
    for (int turn = 0; turn < ROUNDS; turn += 2) {
        high ^= mix((key + (uint64_t)turn * GOLDEN) ^ low) & high_mask;
        low ^= mix((key + (uint64_t)(turn + 1) * GOLDEN) ^ high) & low_mask;
    }
    return high << low_bits | low;
}

/* permute(position, size, key, out) -> -1, or the first position that lies outside its permutation. */
PyObject *permute(PyObject *self, PyObject *args) {
    PyObject *o[4];
    if (!PyArg_ParseTuple(args, "OOOO", &o[0], &o[1], &o[2], &o[3])) return NULL;
    Held held = {.count = 0};
    Py_ssize_t n, n2, n3, n4;
    const int64_t *position, *size;
    const uint64_t *key;
    int64_t *out;
    TAKE(position, o[0], 8, 0, &n)
    TAKE(size, o[1], 8, 0, &n2)
    TAKE(key, o[2], 8, 0, &n3)
    TAKE(out, o[3], 8, 1, &n4)
    /* One size or key may serve all. */
    NEED((n == n2 || n2 == 1) && (n == n3 || n3 == 1) && n == n4, "arrays differ in length")
    Py_ssize_t bad = -1;
    Py_BEGIN_ALLOW_THREADS
    /* First every number once: without a branch, the processor works on several at a time. */
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t count = size[n2 == 1 ? 0 : i];
        if (position[i] < 0 || position[i] >= count) {
            bad = i;
            break;
        }
        uint64_t large = (uint64_t)(count > SMALL ? count : SMALL + 1);
        out[i] = (int64_t)network((uint64_t)position[i], large, mix(key[n3 == 1 ? 0 : i] + GOLDEN));
    }
    for (Py_ssize_t i = 0; i < n && bad < 0; i++) {
        uint64_t count = (uint64_t)size[n2 == 1 ? 0 : i];
        if (count > SMALL && (uint64_t)out[i] < count) continue;
        uint64_t mixed = mix(key[n3 == 1 ? 0 : i] + GOLDEN);
        if (count <= SMALL) out[i] = by_hash((uint64_t)position[i], count, mixed);
        else
            while ((uint64_t)out[i] >= count) out[i] = (int64_t)network((uint64_t)out[i], count, mixed);
    }
    Py_END_ALLOW_THREADS
    release(&held);
    return PyLong_FromSsize_t(bad);
fail:
    release(&held);
    return NULL;
}

/* The tables of a plan: see PackedDocuments.tables in pack/documents.py. */
enum { FULL, LEAF_START, LEAVES, MOVES, RESTS, TABLES };

/* Pieces of documents of one length, numbered from `start` on. */
typedef struct {
    int64_t start, length_index, full_per_document;
} FullRun;

typedef struct {
    int64_t start, length_index, start_in_document;
} RestRun;

typedef struct {
    int64_t node, first;
} Leaf;

/* The documents of a move are `per_row` of `among` rests of its length, which begin in the run `first_run`. */
typedef struct {
    int64_t parent, first, length, per_row, offset, among, first_run;
} Move;

#define NUMBERS(type) ((int64_t)(sizeof(type) / sizeof(int64_t)))

typedef struct {
    const FullRun *full;
    const int64_t *leaf_start;
    const Leaf *leaves;
    const Move *moves;
    const RestRun *rests;
    int64_t full_runs, leaf_count, move_count, rest_runs;
    int64_t seq_len, full_rows, packed_rows;
} Plan;

/* Pieces that were found. Beyond `room` they are only counted. */
typedef struct {
    int64_t *row, *length_index, *nth, *start, *length;
    int64_t room, total;
} Pieces;

/* The way from a leaf up to the root; it grows when a row has more distinct lengths than any before it. */
typedef struct {
    int64_t *node, *place;
    int64_t room, depth;
} Path;

enum { FINE, DAMAGED, NO_MEMORY };

/* First the sizes of all tables, then the tables. */
static int read_plan(Plan *plan, const int64_t *numbers, Py_ssize_t count, int64_t seq_len) {
    const int64_t *table[TABLES], *size = numbers;
    NEED(count >= TABLES, "tables: too short")
    int64_t used = TABLES;
    for (int i = 0; i < TABLES; i++) {
        NEED(size[i] >= 0 && size[i] <= count - used, "tables: too short")
        table[i] = numbers + used;
        used += size[i];
    }
    NEED(size[FULL] && size[FULL] % NUMBERS(FullRun) == 0, "tables: of full rows")
    NEED(size[RESTS] && size[RESTS] % NUMBERS(RestRun) == 0, "tables: of rests")
    NEED(size[MOVES] % NUMBERS(Move) == 0 && size[LEAVES] % NUMBERS(Leaf) == 0, "tables: of moves")
    NEED(size[LEAF_START] == size[LEAVES] / NUMBERS(Leaf) + 1, "tables: of leaves")
    plan->full = (const FullRun *)table[FULL];
    plan->leaf_start = table[LEAF_START];
    plan->leaves = (const Leaf *)table[LEAVES];
    plan->moves = (const Move *)table[MOVES];
    plan->rests = (const RestRun *)table[RESTS];
    /* After the last run stands how many pieces there are. */
    plan->full_runs = size[FULL] / NUMBERS(FullRun) - 1;
    plan->rest_runs = size[RESTS] / NUMBERS(RestRun) - 1;
    plan->leaf_count = size[LEAVES] / NUMBERS(Leaf);
    plan->move_count = size[MOVES] / NUMBERS(Move);
    plan->seq_len = seq_len;
    plan->full_rows = plan->full[plan->full_runs].start;
    plan->packed_rows = plan->leaf_start[plan->leaf_count];
    NEED(plan->full_rows >= 0 && plan->packed_rows >= 0 && plan->full_rows <= INT64_MAX - plan->packed_rows,
         "tables: of rows")
    return 1;
fail:
    return 0;
}

/* A row that one document fills. */
static int put_full_row(const Plan *plan, int64_t number, int64_t i, Pieces *to) {
    int64_t at = to->total++;
    if (at >= to->room) return FINE;
    if (!plan->full_runs) return DAMAGED;
    const FullRun *run = plan->full + last_at_most(&plan->full->start, NUMBERS(FullRun), plan->full_runs, number);
    int64_t per = run->full_per_document;
    if (per < 1) return DAMAGED;
    number -= run->start;
    to->row[at] = i, to->length_index[at] = run->length_index, to->nth[at] = number / per;
    to->start[at] = number % per * plan->seq_len, to->length[at] = plan->seq_len;
    return FINE;
}

static int grow(Path *path) {
    int64_t room = path->room ? 2 * path->room : 256;
    int64_t *node = realloc(path->node, (size_t)room * sizeof *node);
    if (node) path->node = node;
    int64_t *place = realloc(path->place, (size_t)room * sizeof *place);
    if (place) path->place = place;
    if (!node || !place) return NO_MEMORY;
    path->room = room;
    return FINE;
}

/* Whether each packed row is a leaf of its own, as in small packings: then no leaf has to be searched for. */
static inline int is_leaf_per_row(const Plan *plan) { return plan->leaf_count == plan->packed_rows; }

/* From the leaf of a packed row up to the root. */
static int climb(const Plan *plan, int64_t number, Path *path) {
    if (!plan->leaf_count) return DAMAGED;
    int64_t leaf = number, within = 0;
    if (!is_leaf_per_row(plan)) {
        leaf = last_at_most(plan->leaf_start, 1, plan->leaf_count, number);
        within = number - plan->leaf_start[leaf];
    }
    int64_t node = plan->leaves[leaf].node, at = plan->leaves[leaf].first + within;
    path->depth = 0;
    while (node >= 0 && node < plan->move_count) {
        /* A longer way than there are nodes goes in circles. */
        if (path->depth > plan->move_count) return DAMAGED;
        if (path->depth == path->room && grow(path)) return NO_MEMORY;
        path->node[path->depth] = node, path->place[path->depth++] = at;
        at += plan->moves[node].first;
        node = plan->moves[node].parent;
    }
    return node == -1 ? FINE : DAMAGED;
}

/* The pieces of a packed row, from the root down: the longest first. Until `settle`, `length_index` is the move, and
   `start` and `nth` say which document of its length a piece is. */
static int put_packed_row(const Plan *plan, Path *path, const uint64_t *key, int64_t i, Pieces *to) {
    while (path->depth-- > 0) {
        int64_t node = path->node[path->depth];
        const Move *move = &plan->moves[node];
        int64_t count = move->per_row, position = move->offset + path->place[path->depth] * count;
        if (count < 0 || count > plan->seq_len || count > move->among) return DAMAGED;
        if (position < 0 || position > move->among - count) return DAMAGED;
        if (move->first_run < 0 || move->first_run >= plan->rest_runs) return DAMAGED;
        __builtin_prefetch(&plan->rests[move->first_run]);
        int in_network = key && move->among > SMALL;
        uint64_t mixed = in_network ? mix(mix(mix(*key + GOLDEN) + (uint64_t)move->length) + GOLDEN) : 0;
        int64_t at = to->total;
        to->total += count;
        for (int64_t end = to->total < to->room ? to->total : to->room; at < end; at++, position++) {
            to->row[at] = i, to->length_index[at] = node, to->length[at] = move->length, to->start[at] = position;
            /* Once for now, as in permute. */
            to->nth[at] = in_network ? (int64_t)network((uint64_t)position, (uint64_t)move->among, mixed) : position;
        }
    }
    return FINE;
}

/* Which document a piece of a packed row is, by its position among those of its length. */
static void settle(const Plan *plan, const uint64_t *key, int64_t at, Pieces *to) {
    const Move *move = &plan->moves[to->length_index[at]];
    int64_t j = to->nth[at];
    uint64_t among = (uint64_t)move->among;
    /* Most documents of a small packing are the only ones of their length. */
    if (key && among > 1 && ((uint64_t)j >= among || among <= SMALL)) {
        uint64_t mixed = mix(mix(mix(*key + GOLDEN) + (uint64_t)move->length) + GOLDEN);
        if (among <= SMALL) j = by_hash((uint64_t)to->start[at], among, mixed);
        while ((uint64_t)j >= among) j = (int64_t)network((uint64_t)j, among, mixed);
    }
    const RestRun *run = &plan->rests[move->first_run];
    j += run->start;
    if (j >= run[1].start)
        run = plan->rests + last_at_most(&plan->rests->start, NUMBERS(RestRun), plan->rest_runs, j);
    to->length_index[at] = run->length_index, to->nth[at] = j - run->start, to->start[at] = run->start_in_document;
}

/* The rows asked for, each of one of several plans. */
typedef struct {
    const Plan *plans;
    Py_ssize_t plan_count, count;
    const int64_t *which, *row;
    const uint64_t *key;
} Asked;

/* The leaf of a row that comes later, or NULL if that cannot be told at once. */
static inline const Leaf *later_leaf(const Asked *asked, Py_ssize_t i, const Plan **plan) {
    if (i >= asked->count) return NULL;
    *plan = &asked->plans[asked->which[i]];
    int64_t number = asked->row[i] - (*plan)->full_rows;
    return is_leaf_per_row(*plan) && number >= 0 && number < (*plan)->leaf_count ? &(*plan)->leaves[number] : NULL;
}

/* Rows of many packings lie far apart, and memory is slow: ask for what the rows after this one begin with. */
static inline void fetch_ahead(const Asked *asked, Py_ssize_t i) {
    const Plan *plan;
    const Leaf *leaf = later_leaf(asked, i + 2 * ROWS_AHEAD, &plan);
    if (leaf) __builtin_prefetch(leaf);
    leaf = later_leaf(asked, i + ROWS_AHEAD, &plan);
    if (leaf && leaf->node >= 0 && leaf->node < plan->move_count) __builtin_prefetch(&plan->moves[leaf->node]);
}

static int find_pieces(const Asked *asked, Pieces *to) {
    Path path = {NULL, NULL, 0, 0};
    int found = FINE;
    for (Py_ssize_t i = 0; i < asked->count; i++)
        if (asked->which[i] < 0 || asked->which[i] >= asked->plan_count) return DAMAGED;
    for (Py_ssize_t i = 0; i < asked->count && found == FINE; i++) {
        fetch_ahead(asked, i);
        const Plan *plan = &asked->plans[asked->which[i]];
        int64_t row = asked->row[i];
        if (row < 0 || row >= plan->full_rows + plan->packed_rows) {
            found = DAMAGED;
        } else if (row < plan->full_rows) {
            found = put_full_row(plan, row, i, to);
        } else {
            found = climb(plan, row - plan->full_rows, &path);
            if (found == FINE) found = put_packed_row(plan, &path, asked->key ? &asked->key[i] : NULL, i, to);
        }
    }
    free(path.node);
    free(path.place);
    int64_t written = to->total <= to->room ? to->total : 0;
    for (int64_t at = 0; at < written && found == FINE; at++) {
        int64_t i = to->row[at];
        const Plan *plan = &asked->plans[asked->which[i]];
        if (asked->row[i] >= plan->full_rows) settle(plan, asked->key ? &asked->key[i] : NULL, at, to);
    }
    return found;
}

/* pack(rows, keys, which, seq_len, tables, row, length_index, nth, start, length): pack/documents.py for many rows:
   which pieces of documents each holds. Row i is one of the packing tables[which[i]].
   -> how many pieces there are; they are written if there is room for all: if there is not, ask again with as much as
   it takes. */
PyObject *pack(PyObject *self, PyObject *args) {
    PyObject *o[8], *objects;
    long long seq_len;
    if (!PyArg_ParseTuple(args, "OOOLOOOOOO", &o[0], &o[1], &o[2], &seq_len, &objects, &o[3], &o[4], &o[5], &o[6],
                          &o[7]))
        return NULL;
    Held held = {.count = 0};
    Tables tables;
    Plan *plans = NULL;
    Py_ssize_t n2, n3, room, r2, r3, r4, r5;
    Asked asked = {.key = NULL};
    Pieces to = {.total = 0};
    if (!take_tables(&tables, objects)) goto fail;
    plans = PyMem_Malloc((size_t)tables.count * sizeof *plans);
    if (!plans) {
        PyErr_NoMemory();
        goto fail;
    }
    for (Py_ssize_t i = 0; i < tables.count; i++)
        if (!read_plan(&plans[i], tables.table[i], tables.items[i], seq_len)) goto fail;
    asked.plans = plans;
    asked.plan_count = tables.count;
    TAKE(asked.row, o[0], 8, 0, &asked.count)
    if (o[1] != Py_None) {
        TAKE(asked.key, o[1], 8, 0, &n2)
        NEED(asked.count == n2, "arrays differ in length")
    }
    TAKE(asked.which, o[2], 8, 0, &n3)
    NEED(asked.count == n3, "arrays differ in length")
    TAKE(to.row, o[3], 8, 1, &room)
    TAKE(to.length_index, o[4], 8, 1, &r2)
    TAKE(to.nth, o[5], 8, 1, &r3)
    TAKE(to.start, o[6], 8, 1, &r4)
    TAKE(to.length, o[7], 8, 1, &r5)
    NEED(room == r2 && room == r3 && room == r4 && room == r5, "arrays of pieces differ in length")
    to.room = room;
    int found;
    Py_BEGIN_ALLOW_THREADS
    found = find_pieces(&asked, &to);
    Py_END_ALLOW_THREADS
    NEED(found != DAMAGED, "no such row, or a damaged plan")
    if (found == NO_MEMORY) {
        PyErr_NoMemory();
        goto fail;
    }
    PyMem_Free(plans);
    release_tables(&tables);
    release(&held);
    return PyLong_FromLongLong(to.total);
fail:
    PyMem_Free(plans);
    release_tables(&tables);
    release(&held);
    return NULL;
}
