/* Which row stands at a position, and which documents a packed row holds: order/permutation.py and pack/documents.py. */

#include <stdlib.h>

#include "kernel.h"

/* order/permutation.py, number by number: see there for what it does and why. */
#define GOLDEN 0x9E3779B97F4A7C15ULL
#define ROUNDS 8
#define SMALL 32

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
enum { FULL_START, FULL_INDEX, FULL_PER, REST_AT, LEAF_START, LEAF_NODE, LEAF_FIRST, PARENT, FIRST, LENGTH, PER_ROW,
       OFFSET, PLACE_OF, COUNTS, REST_START, FIRST_RUN, RUN_START, RUN_INDEX, TABLES };

typedef struct {
    const int64_t *t[TABLES];
    Py_ssize_t size[TABLES];
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

static int take_plan(Plan *plan, Held *held, PyObject *tables, int64_t seq_len) {
    NEED(PyTuple_Check(tables) && PyTuple_Size(tables) == TABLES, "tables: wrong number")
    for (int i = 0; i < TABLES; i++) {
        plan->t[i] = take(held, PyTuple_GetItem(tables, i), 8, 0, &plan->size[i], "tables");
        if (PyErr_Occurred()) goto fail;
    }
    const Py_ssize_t *size = plan->size;
    NEED(size[FULL_START] == size[FULL_INDEX] + 1 && size[FULL_PER] == size[REST_AT], "tables: of full rows")
    NEED(size[LEAF_START] == size[LEAF_NODE] + 1 && size[LEAF_NODE] == size[LEAF_FIRST], "tables: of leaves")
    NEED(size[PARENT] == size[FIRST] && size[PARENT] == size[LENGTH] && size[PARENT] == size[PER_ROW] &&
         size[PARENT] == size[OFFSET], "tables: of moves")
    NEED(size[COUNTS] == size[REST_START] && size[COUNTS] == size[FIRST_RUN] &&
         size[RUN_START] == size[RUN_INDEX] + 1, "tables: of classes")
    plan->seq_len = seq_len;
    plan->full_rows = plan->t[FULL_START][size[FULL_INDEX]];
    plan->packed_rows = plan->t[LEAF_START][size[LEAF_NODE]];
    return 1;
fail:
    return 0;
}

/* A row that one document fills. */
static int put_full_row(const Plan *plan, int64_t number, int64_t i, Pieces *to) {
    int64_t at = to->total++;
    if (at >= to->room) return FINE;
    int64_t run = last_at_most(plan->t[FULL_START], plan->size[FULL_INDEX], number);
    int64_t index = plan->t[FULL_INDEX][run];
    if (index < 0 || index >= plan->size[FULL_PER] || plan->t[FULL_PER][index] < 1) return DAMAGED;
    int64_t per = plan->t[FULL_PER][index];
    number -= plan->t[FULL_START][run];
    to->row[at] = i, to->length_index[at] = index, to->nth[at] = number / per;
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

/* From the leaf of a packed row up to the root. */
static int climb(const Plan *plan, int64_t number, Path *path) {
    const int64_t *const *t = plan->t;
    int64_t leaf = last_at_most(t[LEAF_START], plan->size[LEAF_NODE], number);
    int64_t node = t[LEAF_NODE][leaf], at = t[LEAF_FIRST][leaf] + number - t[LEAF_START][leaf];
    path->depth = 0;
    while (node >= 0 && node < plan->size[PARENT]) {
        /* A longer way than there are nodes goes in circles. */
        if (path->depth > plan->size[PARENT]) return DAMAGED;
        if (path->depth == path->room && grow(path)) return NO_MEMORY;
        path->node[path->depth] = node, path->place[path->depth++] = at;
        at += t[FIRST][node];
        node = t[PARENT][node];
    }
    return node == -1 ? FINE : DAMAGED;
}

/* The pieces of a packed row, from the root down: the longest first. Which document of its class a piece is stands in
   `start` and `nth` until `settle`. */
static int put_packed_row(const Plan *plan, Path *path, const uint64_t *key, int64_t i, Pieces *to) {
    const int64_t *const *t = plan->t;
    while (path->depth-- > 0) {
        int64_t move = path->node[path->depth], count = t[PER_ROW][move], of = t[LENGTH][move];
        int64_t class = of > 0 && of < plan->size[PLACE_OF] ? t[PLACE_OF][of] : -1;
        int64_t position = t[OFFSET][move] + path->place[path->depth] * count;
        if (class < 0 || class >= plan->size[COUNTS] || position < 0 || position + count > t[COUNTS][class])
            return DAMAGED;
        uint64_t among = (uint64_t)t[COUNTS][class], large = among > SMALL ? among : SMALL + 1;
        uint64_t mixed = key ? mix(mix(mix(*key + GOLDEN) + (uint64_t)of) + GOLDEN) : 0;
        for (int64_t k = 0; k < count; k++, position++) {
            int64_t at = to->total++;
            if (at >= to->room) continue;
            to->row[at] = i, to->length[at] = of, to->start[at] = position;
            /* Once for now, without a branch, as in permute. */
            to->nth[at] = key ? (int64_t)network((uint64_t)position, large, mixed) : position;
        }
    }
    return FINE;
}

/* Which document a piece of a packed row is, by its position within its class. */
static int settle(const Plan *plan, const uint64_t *key, int64_t at, Pieces *to) {
    const int64_t *const *t = plan->t;
    int64_t class = t[PLACE_OF][to->length[at]], j = to->nth[at];
    uint64_t among = (uint64_t)t[COUNTS][class];
    if (key && ((uint64_t)j >= among || among <= SMALL)) {
        uint64_t mixed = mix(mix(mix(*key + GOLDEN) + (uint64_t)to->length[at]) + GOLDEN);
        if (among <= SMALL) j = by_hash((uint64_t)to->start[at], among, mixed);
        while ((uint64_t)j >= among) j = (int64_t)network((uint64_t)j, among, mixed);
    }
    int64_t run = t[FIRST_RUN][class];
    j += t[REST_START][class];
    if (run < 0 || run >= plan->size[RUN_INDEX]) return DAMAGED;
    if (j >= t[RUN_START][run + 1]) run = last_at_most(t[RUN_START], plan->size[RUN_INDEX], j);
    int64_t index = t[RUN_INDEX][run];
    if (index < 0 || index >= plan->size[REST_AT]) return DAMAGED;
    to->length_index[at] = index, to->nth[at] = j - t[RUN_START][run], to->start[at] = t[REST_AT][index];
    return FINE;
}

static int find_pieces(const Plan *plan, const int64_t *rows, const uint64_t *keys, Py_ssize_t n, Pieces *to) {
    Path path = {NULL, NULL, 0, 0};
    int found = FINE;
    for (Py_ssize_t i = 0; i < n && found == FINE; i++) {
        if (rows[i] < 0 || rows[i] >= plan->full_rows + plan->packed_rows) {
            found = DAMAGED;
        } else if (rows[i] < plan->full_rows) {
            found = put_full_row(plan, rows[i], i, to);
        } else {
            found = climb(plan, rows[i] - plan->full_rows, &path);
            if (found == FINE) found = put_packed_row(plan, &path, keys ? &keys[i] : NULL, i, to);
        }
    }
    free(path.node);
    free(path.place);
    int64_t written = to->total <= to->room ? to->total : 0;
    for (int64_t at = 0; at < written && found == FINE; at++)
        if (rows[to->row[at]] >= plan->full_rows)
            found = settle(plan, keys ? &keys[to->row[at]] : NULL, at, to);
    return found;
}

/* pack(rows, keys, seq_len, tables, row, length_index, nth, start, length): pack/documents.py for many rows: which
   pieces of documents each holds. -> how many pieces there are; they are written if there is room for all: if there is
   not, ask again with as much as it takes. */
PyObject *pack(PyObject *self, PyObject *args) {
    PyObject *o[7], *tables;
    long long seq_len;
    if (!PyArg_ParseTuple(args, "OOLOOOOOO", &o[0], &o[1], &seq_len, &tables, &o[2], &o[3], &o[4], &o[5], &o[6]))
        return NULL;
    Held held = {.count = 0};
    Py_ssize_t n, n2, room, r2, r3, r4, r5;
    const int64_t *rows;
    const uint64_t *keys = NULL;
    Plan plan;
    Pieces to = {.total = 0};
    if (!take_plan(&plan, &held, tables, seq_len)) goto fail;
    TAKE(rows, o[0], 8, 0, &n)
    if (o[1] != Py_None) {
        TAKE(keys, o[1], 8, 0, &n2)
        NEED(n == n2, "arrays differ in length")
    }
    TAKE(to.row, o[2], 8, 1, &room)
    TAKE(to.length_index, o[3], 8, 1, &r2)
    TAKE(to.nth, o[4], 8, 1, &r3)
    TAKE(to.start, o[5], 8, 1, &r4)
    TAKE(to.length, o[6], 8, 1, &r5)
    NEED(room == r2 && room == r3 && room == r4 && room == r5, "arrays of pieces differ in length")
    to.room = room;
    int found;
    Py_BEGIN_ALLOW_THREADS
    found = find_pieces(&plan, rows, keys, n, &to);
    Py_END_ALLOW_THREADS
    NEED(found != DAMAGED, "no such row, or a damaged plan")
    if (found == NO_MEMORY) {
        PyErr_NoMemory();
        goto fail;
    }
    release(&held);
    return PyLong_FromLongLong(to.total);
fail:
    release(&held);
    return NULL;
}
