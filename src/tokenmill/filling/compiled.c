/* The inner loops of loading: mapped tokens into inputs and targets, and what follows from where documents start.

   numpy does the same in kernels.py and cover.py, in several passes over values that are too many for the cache; here
   every value is written once. That is the only difference: tests compare the two, and where this module was not
   compiled, numpy does the work.

   Tokens are found by index: token i is at address (i + 1) * itemsize, as in `store/mapping.py`. The caller makes sure
   that the rows are mapped. Where values go is checked here. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* One version for each generation of vector units, chosen when the module is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
/* Products and quotients of 64 bits, which only some of these units have. */
#define WIDE_VECTORS __attribute__((target_clones("arch=skylake-avx512", "avx2", "default")))
#endif
#endif
#ifndef VECTORS
#define VECTORS
#define WIDE_VECTORS
#endif

#if defined(__GNUC__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

/* Tokens that are still in the first-level cache when they are read a second time, for targets. */
#define TILE 2048
/* How much of the next row or piece is prefetched; the CPU prefetches the rest by itself. */
#define AHEAD_BYTES 1024
/* The index of a piece that is padding. */
#define BLANK (-2)

#define MAKE_WIDEN(NAME, FROM, TO)                                                                                     \
    VECTORS static void NAME(const FROM *restrict from, TO *restrict to, Py_ssize_t count)                             \
    {                                                                                                                  \
        for (Py_ssize_t i = 0; i < count; i++)                                                                         \
            to[i] = (TO)from[i];                                                                                       \
    }

MAKE_WIDEN(widen_u16_i64, uint16_t, int64_t)
MAKE_WIDEN(widen_u16_i32, uint16_t, int32_t)
MAKE_WIDEN(widen_i32_i64, int32_t, int64_t)
MAKE_WIDEN(widen_i32_i32, int32_t, int32_t)

VECTORS static void fill_i64(int64_t *to, int64_t value, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        to[i] = value;
}

VECTORS static void fill_i32(int32_t *to, int32_t value, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        to[i] = value;
}

VECTORS static void count_up(int32_t *to, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        to[i] = (int32_t)i;
}

/* Tokens as they are stored and as batches have them. */
typedef struct {
    Py_ssize_t from_bytes, to_bytes;
} Kind;

static void widen(Kind kind, const char *from, char *to, Py_ssize_t count)
{
    if (kind.from_bytes == 2 && kind.to_bytes == 8)
        widen_u16_i64((const uint16_t *)from, (int64_t *)to, count);
    else if (kind.from_bytes == 2)
        widen_u16_i32((const uint16_t *)from, (int32_t *)to, count);
    else if (kind.to_bytes == 8)
        widen_i32_i64((const int32_t *)from, (int64_t *)to, count);
    else
        widen_i32_i32((const int32_t *)from, (int32_t *)to, count);
}

static void fill(Kind kind, char *to, int32_t value, Py_ssize_t count)
{
    if (kind.to_bytes == 8)
        fill_i64((int64_t *)to, value, count);
    else
        fill_i32((int32_t *)to, value, count);
}

static const char *address_of(Kind kind, int64_t index)
{
    return (const char *)((uintptr_t)(index + 1) * (uintptr_t)kind.from_bytes);
}

static void ask_for(Kind kind, int64_t index, Py_ssize_t count)
{
    const char *start = address_of(kind, index);
    Py_ssize_t num_bytes = count * kind.from_bytes;
    if (num_bytes > AHEAD_BYTES)
        num_bytes = AHEAD_BYTES;
    for (Py_ssize_t i = 0; i < num_bytes; i += 64)
        PREFETCH(start + i);
}

/* Inputs are the tokens from an index on, targets those from the next one on. */
static void copy_stretch(Kind kind, int64_t index, char *inputs, char *targets, Py_ssize_t num_inputs,
                         Py_ssize_t num_targets)
{
    const char *from = address_of(kind, index);
    for (Py_ssize_t i = 0; i < num_inputs; i += TILE) {
        Py_ssize_t left = num_inputs - i, left_targets = num_targets - i;
        widen(kind, from + i * kind.from_bytes, inputs + i * kind.to_bytes, left < TILE ? left : TILE);
        widen(kind, from + (i + 1) * kind.from_bytes, targets + i * kind.to_bytes,
              left_targets < TILE ? left_targets : TILE);
    }
}

/* Buffers of a call, released together. */
typedef struct {
    Py_buffer views[8];
    int count;
} Buffers;

/* Release the buffers of a call, and return its result: None, or NULL after an error. */
static PyObject *finish(Buffers *buffers, int is_good)
{
    while (buffers->count > 0)
        PyBuffer_Release(&buffers->views[--buffers->count]);
    return is_good ? Py_NewRef(Py_None) : NULL;
}

static Py_buffer *borrow(Buffers *buffers, PyObject *object, const char *name, Py_ssize_t itemsize, int is_written)
{
    Py_buffer *view = &buffers->views[buffers->count];
    int flags = PyBUF_C_CONTIGUOUS | (is_written ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, view, flags) < 0)
        return NULL;
    buffers->count++;
    if (itemsize && view->itemsize != itemsize) {
        PyErr_Format(PyExc_ValueError, "%s have %zd bytes each, not %zd", name, view->itemsize, itemsize);
        return NULL;
    }
    return view;
}

static Py_ssize_t length_of(const Py_buffer *view) { return view->len / view->itemsize; }

/* Where the rows of a call go. */
typedef struct {
    Kind kind;
    char *inputs, *targets;
    Py_ssize_t num_rows, seq_len;
    const int64_t *places;
} Rows;

/* Borrow places, inputs and targets, and check that they have room for `count` rows. */
static int open_rows(Rows *rows, Buffers *buffers, Py_ssize_t from_bytes, Py_ssize_t count, PyObject *const *objects)
{
    Py_buffer *places = NULL, *inputs, *targets;
    if ((objects[0] != Py_None && !(places = borrow(buffers, objects[0], "places", 8, 0))) ||
        !(inputs = borrow(buffers, objects[1], "inputs", 0, 1)) ||
        !(targets = borrow(buffers, objects[2], "targets", 0, 1)))
        return 0;
    if (inputs->ndim != 2 || targets->ndim != 2 || inputs->itemsize != targets->itemsize ||
        inputs->shape[0] != targets->shape[0] || inputs->shape[1] != targets->shape[1]) {
        PyErr_SetString(PyExc_ValueError, "inputs and targets are not rows of one shape and type");
        return 0;
    }
    if ((from_bytes != 2 && from_bytes != 4) || (inputs->itemsize != 4 && inputs->itemsize != 8)) {
        PyErr_Format(PyExc_ValueError, "tokens of %zd bytes do not become values of %zd", from_bytes, inputs->itemsize);
        return 0;
    }
    *rows = (Rows){{from_bytes, inputs->itemsize}, inputs->buf, targets->buf, inputs->shape[0], inputs->shape[1],
                   places ? places->buf : NULL};
    if (places ? length_of(places) != count : count > rows->num_rows) {
        PyErr_Format(PyExc_ValueError, "there is no place for %zd rows", count);
        return 0;
    }
    for (Py_ssize_t i = 0; places && i < count; i++)
        if (rows->places[i] < 0 || rows->places[i] >= rows->num_rows) {
            PyErr_Format(PyExc_IndexError, "row %lld is not among %zd", (long long)rows->places[i], rows->num_rows);
            return 0;
        }
    return 1;
}

static Py_ssize_t offset_of(const Rows *rows, Py_ssize_t number)
{
    Py_ssize_t place = rows->places ? (Py_ssize_t)rows->places[number] : number;
    return place * rows->seq_len * rows->kind.to_bytes;
}

PyDoc_STRVAR(copy_rows_doc, "copy_rows(indices, itemsize, places, inputs, targets)\n--\n\n"
                            "Copy rows that lie in one stretch each, with the target of the last token after them.");

static PyObject *copy_rows(PyObject *module, PyObject *args)
{
    (void)module;
    Buffers buffers = {.count = 0};
    PyObject *o[4];
    Py_buffer *view;
    Py_ssize_t from_bytes;
    Rows rows;
    if (!PyArg_ParseTuple(args, "OnOOO:copy_rows", o, &from_bytes, o + 1, o + 2, o + 3) ||
        !(view = borrow(&buffers, o[0], "indices", 8, 0)) ||
        !open_rows(&rows, &buffers, from_bytes, length_of(view), o + 1))
        return finish(&buffers, 0);
    const int64_t *indices = view->buf;
    Py_ssize_t num_rows = length_of(view);
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t i = 0; i < num_rows; i++) {
        if (i + 1 < num_rows)
            ask_for(rows.kind, indices[i + 1], rows.seq_len);
        Py_ssize_t offset = offset_of(&rows, i);
        copy_stretch(rows.kind, indices[i], rows.inputs + offset, rows.targets + offset, rows.seq_len, rows.seq_len);
    }
    Py_END_ALLOW_THREADS;
    return finish(&buffers, 1);
}

/* Pieces of documents, of which row i has those from edges[i] up to edges[i + 1]. */
typedef struct {
    const int64_t *edges, *indices, *lengths;
    Py_ssize_t num_pieces;
} Pieces;

static int check_pieces(const Pieces *pieces, Py_ssize_t num_rows, Py_ssize_t seq_len)
{
    const int64_t *edges = pieces->edges;
    int is_good = num_rows >= 0 && edges[0] >= 0 && edges[num_rows] <= pieces->num_pieces;
    for (Py_ssize_t i = 0; is_good && i < num_rows; i++) {
        int64_t used = 0;
        is_good = edges[i] <= edges[i + 1] && edges[i + 1] <= pieces->num_pieces;
        for (int64_t piece = edges[i]; is_good && piece < edges[i + 1]; piece++) {
            is_good = pieces->lengths[piece] >= 0 && pieces->lengths[piece] <= seq_len - used;
            used += is_good ? pieces->lengths[piece] : 0;
        }
    }
    if (!is_good)
        PyErr_SetString(PyExc_ValueError, "pieces do not fit their rows");
    return is_good;
}

static void join_row(const Rows *rows, const Pieces *pieces, Py_ssize_t number, int32_t ignored)
{
    Kind kind = rows->kind;
    char *inputs = rows->inputs + offset_of(rows, number), *targets = rows->targets + offset_of(rows, number);
    Py_ssize_t left = rows->seq_len;
    for (int64_t piece = pieces->edges[number]; piece < pieces->edges[number + 1]; piece++) {
        Py_ssize_t length = (Py_ssize_t)pieces->lengths[piece];
        /* Padding is not read, so ask for the piece after it. */
        int64_t next = piece + 1;
        if (next < pieces->num_pieces && pieces->indices[next] == BLANK)
            next++;
        if (next < pieces->num_pieces && pieces->indices[next] >= 0)
            ask_for(kind, pieces->indices[next], (Py_ssize_t)pieces->lengths[next]);
        if (length == 0)
            continue;
        /* A piece without an address is filled in by the caller, unless it is padding. */
        if (pieces->indices[piece] >= 0)
            copy_stretch(kind, pieces->indices[piece], inputs, targets, length, length - 1);
        else if (pieces->indices[piece] == BLANK) {
            fill(kind, inputs, 0, length);
            fill(kind, targets, ignored, length);
        }
        inputs += length * kind.to_bytes;
        targets += length * kind.to_bytes;
        fill(kind, targets - kind.to_bytes, ignored, 1);
        left -= length;
    }
    fill(kind, inputs, 0, left);
    fill(kind, targets, ignored, left);
}

PyDoc_STRVAR(copy_pieces_doc,
             "copy_pieces(edges, indices, lengths, ignored, itemsize, places, inputs, targets)\n--\n\n"
             "Join rows from pieces, of which row i has those from edges[i] up to edges[i + 1], and pad them.\n\n"
             "The last token of a piece has the target `ignored`. A piece with the index -2 is padding, and one with\n"
             "another negative index is left out.");

static PyObject *copy_pieces(PyObject *module, PyObject *args)
{
    (void)module;
    Buffers buffers = {.count = 0};
    PyObject *o[6];
    Py_buffer *edges, *indices, *lengths;
    Py_ssize_t from_bytes;
    int ignored;
    Rows rows;
    if (!PyArg_ParseTuple(args, "OOOinOOO:copy_pieces", o, o + 1, o + 2, &ignored, &from_bytes, o + 3, o + 4, o + 5) ||
        !(edges = borrow(&buffers, o[0], "edges", 8, 0)) || !(indices = borrow(&buffers, o[1], "indices", 8, 0)) ||
        !(lengths = borrow(&buffers, o[2], "lengths", 8, 0)) ||
        !open_rows(&rows, &buffers, from_bytes, length_of(edges) - 1, o + 3))
        return finish(&buffers, 0);
    Py_ssize_t num_rows = length_of(edges) - 1;
    Pieces pieces = {edges->buf, indices->buf, lengths->buf, length_of(indices)};
    if (length_of(lengths) != pieces.num_pieces) {
        PyErr_SetString(PyExc_ValueError, "there are not as many lengths as indices");
        return finish(&buffers, 0);
    }
    if (!check_pieces(&pieces, num_rows, rows.seq_len))
        return finish(&buffers, 0);
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t i = 0; i < num_rows; i++)
        join_row(&rows, &pieces, i, (int32_t)ignored);
    Py_END_ALLOW_THREADS;
    return finish(&buffers, 1);
}

PyDoc_STRVAR(spread_doc, "spread(lengths, ids, positions, segment_ids)\n--\n\n"
                         "Count up from 0 in every segment, and write its id for each of its tokens; None is left out.");

static PyObject *spread(PyObject *module, PyObject *args)
{
    (void)module;
    Buffers buffers = {.count = 0};
    PyObject *o[4];
    Py_buffer *length_view, *id_view, *positions = NULL, *segment_ids = NULL;
    if (!PyArg_ParseTuple(args, "OOOO:spread", o, o + 1, o + 2, o + 3) ||
        !(length_view = borrow(&buffers, o[0], "lengths", 8, 0)) || !(id_view = borrow(&buffers, o[1], "ids", 4, 0)) ||
        (o[2] != Py_None && !(positions = borrow(&buffers, o[2], "positions", 4, 1))) ||
        (o[3] != Py_None && !(segment_ids = borrow(&buffers, o[3], "segment_ids", 4, 1))))
        return finish(&buffers, 0);
    const int64_t *lengths = length_view->buf;
    const int32_t *ids = id_view->buf;
    Py_ssize_t num_segments = length_of(length_view), size = 0;
    int is_good = length_of(id_view) == num_segments;
    for (Py_ssize_t i = 0; is_good && i < num_segments; i++) {
        is_good = lengths[i] >= 0 && lengths[i] <= INT32_MAX;
        size += is_good ? (Py_ssize_t)lengths[i] : 0;
    }
    if (!is_good || (positions && length_of(positions) != size) || (segment_ids && length_of(segment_ids) != size)) {
        PyErr_SetString(PyExc_ValueError, "segments do not cover what is to be written");
        return finish(&buffers, 0);
    }
    Py_BEGIN_ALLOW_THREADS;
    int32_t *next_positions = positions ? positions->buf : NULL, *next_ids = segment_ids ? segment_ids->buf : NULL;
    for (Py_ssize_t i = 0; i < num_segments; i++) {
        Py_ssize_t length = (Py_ssize_t)lengths[i];
        if (next_positions) {
            count_up(next_positions, length);
            next_positions += length;
        }
        if (next_ids) {
            fill_i32(next_ids, ids[i], length);
            next_ids += length;
        }
    }
    Py_END_ALLOW_THREADS;
    return finish(&buffers, 1);
}

static int64_t token_at(const char *row, Py_ssize_t itemsize, Py_ssize_t place)
{
    return itemsize == 8 ? ((const int64_t *)row)[place] : ((const int32_t *)row)[place];
}

/* Whether `max_count` equal groups of one to `max_period` tokens follow each other in a row.

   Tokens equal those a period before in a stretch of at least `need`. One comparison in each `need` tokens finds a
   stretch if there is one; then tokens are compared backwards, up to the last place where they are known to differ. */
static int repeats(const char *row, Py_ssize_t itemsize, Py_ssize_t length, Py_ssize_t min_period,
                   Py_ssize_t max_period, Py_ssize_t max_count)
{
    for (Py_ssize_t period = min_period; period <= max_period && period <= length / max_count; period++) {
        Py_ssize_t need = period * (max_count - 1), differs = period - 1;
        for (Py_ssize_t i = differs + need; i < length; i = differs + need) {
            Py_ssize_t j = i;
            while (j > differs && token_at(row, itemsize, j) == token_at(row, itemsize, j - period))
                j--;
            if (j == differs)
                return 1;
            differs = j;
        }
    }
    return 0;
}

PyDoc_STRVAR(find_repetitions_doc,
             "find_repetitions(inputs, lengths, min_period, max_period, max_count, found)\n--\n\n"
             "Write 1 for each row, of that many tokens, in which a group of tokens repeats so often.");

static PyObject *find_repetitions(PyObject *module, PyObject *args)
{
    (void)module;
    Buffers buffers = {.count = 0};
    PyObject *o[3];
    Py_ssize_t min_period, max_period, max_count;
    Py_buffer *inputs, *lengths, *found;
    if (!PyArg_ParseTuple(args, "OOnnnO:find_repetitions", o, o + 1, &min_period, &max_period, &max_count, o + 2) ||
        !(inputs = borrow(&buffers, o[0], "inputs", 0, 0)) || !(lengths = borrow(&buffers, o[1], "lengths", 8, 0)) ||
        !(found = borrow(&buffers, o[2], "found", 8, 1)))
        return finish(&buffers, 0);
    int is_good = inputs->ndim == 2 && (inputs->itemsize == 4 || inputs->itemsize == 8) && min_period > 0 &&
                  max_count > 1 && max_period < PY_SSIZE_T_MAX / max_count &&
                  length_of(lengths) == inputs->shape[0] && length_of(found) == inputs->shape[0];
    const int64_t *sizes = lengths->buf;
    for (Py_ssize_t i = 0; is_good && i < inputs->shape[0]; i++)
        is_good = sizes[i] >= 0 && sizes[i] <= inputs->shape[1];
    if (!is_good) {
        PyErr_SetString(PyExc_ValueError, "these are not rows, their lengths, periods and a count");
        return finish(&buffers, 0);
    }
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t i = 0; i < inputs->shape[0]; i++)
        ((int64_t *)found->buf)[i] =
            repeats((const char *)inputs->buf + i * inputs->shape[1] * inputs->itemsize, inputs->itemsize,
                    (Py_ssize_t)sizes[i], min_period, max_period, max_count);
    Py_END_ALLOW_THREADS;
    return finish(&buffers, 1);
}

/* Keys whose remainders are computed together, in vectors. */
#define KEYS 256
/* For a divisor of at least this, a quotient in double precision is wrong by less than one. */
#define LEAST_DIVISOR 65536

WIDE_VECTORS static void find_remainders(const int64_t *restrict keys, int64_t *restrict remainders, int64_t divisor)
{
    double inverse = 1.0 / (double)divisor;
    for (Py_ssize_t i = 0; i < KEYS; i++) {
        int64_t rest = keys[i] - (int64_t)((double)keys[i] * inverse) * divisor;
        rest += rest < 0 ? divisor : 0;
        rest += rest < 0 ? divisor : 0;
        rest -= rest >= divisor ? divisor : 0;
        remainders[i] = rest;
    }
}

/* Ignore the targets of a row whose product with the tokens before them has a remainder that is dropped. */
#define MAKE_DROP(NAME, MULTIPLY, KIND)                                                                                \
    WIDE_VECTORS static void MULTIPLY(const KIND *restrict inputs, const KIND *restrict targets,                       \
                                      int64_t *restrict keys, Py_ssize_t count, Py_ssize_t context)                    \
    {                                                                                                                  \
        for (Py_ssize_t i = 0; i < count; i++)                                                                         \
            keys[i] = targets[i];                                                                                      \
        for (Py_ssize_t before = 0; before < context - 1; before++)                                                    \
            for (Py_ssize_t i = 0; i < count; i++)                                                                     \
                keys[i] = (int64_t)((uint64_t)keys[i] * (uint64_t)(int64_t)inputs[i - before]);                        \
    }                                                                                                                  \
                                                                                                                       \
    static int64_t NAME(const KIND *inputs, KIND *targets, Py_ssize_t seq_len, const uint32_t *dropped, int64_t size,  \
                        Py_ssize_t context, KIND ignored)                                                              \
    {                                                                                                                  \
        int64_t keys[KEYS] = {0}, places[KEYS], num_dropped = 0;                                                       \
        for (Py_ssize_t first = context - 1; first < seq_len; first += KEYS) {                                         \
            Py_ssize_t count = seq_len - first < KEYS ? seq_len - first : KEYS;                                        \
            MULTIPLY(inputs + first, targets + first, keys, count, context);                                           \
            if (size >= LEAST_DIVISOR)                                                                                 \
                find_remainders(keys, places, size);                                                                   \
            else                                                                                                       \
                for (Py_ssize_t i = 0; i < count; i++)                                                                 \
                    places[i] = (keys[i] % size + size) % size;                                                        \
            for (Py_ssize_t i = 0; i < count; i++) {                                                                   \
                /* Without a branch, which the CPU would often mispredict. */                                          \
                KIND target = targets[first + i], all;                                                                 \
                all = -(KIND)(dropped[places[i] >> 5] >> (places[i] & 31) & (target != ignored));                      \
                num_dropped -= all;                                                                                    \
                targets[first + i] = (target & ~all) | (ignored & all);                                                \
            }                                                                                                          \
        }                                                                                                              \
        return num_dropped;                                                                                            \
    }

MAKE_DROP(drop_i64, multiply_i64, int64_t)
MAKE_DROP(drop_i32, multiply_i32, int32_t)

PyDoc_STRVAR(drop_targets_doc,
             "drop_targets(inputs, targets, dropped, size, context, ignored, counts)\n--\n\n"
             "Ignore targets by the product of `context` tokens, the target included: if its remainder by `size` has a "
             "bit in `dropped`.");

static PyObject *drop_targets(PyObject *module, PyObject *args)
{
    (void)module;
    Buffers buffers = {.count = 0};
    PyObject *o[4];
    Py_ssize_t context, size;
    int ignored;
    Py_buffer *inputs, *targets, *dropped, *counts;
    if (!PyArg_ParseTuple(args, "OOOnniO:drop_targets", o, o + 1, o + 2, &size, &context, &ignored, o + 3) ||
        !(inputs = borrow(&buffers, o[0], "inputs", 0, 0)) || !(targets = borrow(&buffers, o[1], "targets", 0, 1)) ||
        !(dropped = borrow(&buffers, o[2], "dropped", 4, 0)) || !(counts = borrow(&buffers, o[3], "counts", 8, 1)))
        return finish(&buffers, 0);
    if (inputs->ndim != 2 || targets->ndim != 2 || inputs->itemsize != targets->itemsize ||
        (inputs->itemsize != 4 && inputs->itemsize != 8) || inputs->shape[0] != targets->shape[0] ||
        inputs->shape[1] != targets->shape[1] || length_of(counts) != inputs->shape[0] || size < 1 ||
        size > length_of(dropped) * 32 || context < 1) {
        PyErr_SetString(PyExc_ValueError, "inputs and targets are not rows of one shape and type, with their counts");
        return finish(&buffers, 0);
    }
    Py_ssize_t seq_len = inputs->shape[1];
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t i = 0; i < inputs->shape[0]; i++) {
        Py_ssize_t offset = i * seq_len;
        ((int64_t *)counts->buf)[i] =
            inputs->itemsize == 8
                ? drop_i64((const int64_t *)inputs->buf + offset, (int64_t *)targets->buf + offset, seq_len,
                           dropped->buf, size, context, ignored)
                : drop_i32((const int32_t *)inputs->buf + offset, (int32_t *)targets->buf + offset, seq_len,
                           dropped->buf, size, context, ignored);
    }
    Py_END_ALLOW_THREADS;
    return finish(&buffers, 1);
}

static PyMethodDef functions[] = {
    {"copy_rows", copy_rows, METH_VARARGS, copy_rows_doc},
    {"copy_pieces", copy_pieces, METH_VARARGS, copy_pieces_doc},
    {"spread", spread, METH_VARARGS, spread_doc},
    {"find_repetitions", find_repetitions, METH_VARARGS, find_repetitions_doc},
    {"drop_targets", drop_targets, METH_VARARGS, drop_targets_doc},
    {NULL, NULL, 0, NULL},
};

/* Nothing is kept between calls. */
static PyModuleDef_Slot slots[] = {
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "tokenmill.filling.compiled",
    .m_doc = "The inner loops of loading.",
    .m_size = 0,
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_compiled(void) { return PyModuleDef_Init(&definition); }
