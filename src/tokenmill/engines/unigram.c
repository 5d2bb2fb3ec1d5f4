/* Unigram models: the best way to write a word with the pieces of a vocabulary.

   Left to the library is a word that has two best ways, because then the order of additions and their rounding decide,
   one with an unknown piece, several of which become one, and one with a character that is no piece or that may be
   normalized with others. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* Longer words are left to the library. */
#define LONGEST 256
#define NO_PIECE UINT32_MAX
/* More than the rounding errors of any word: 257 pieces whose scores are at most 10,000. */
#define TIE 1e-6
/* What the table of characters has for white space, and for characters that are left to the library. */
#define SPACE 1
#define UNKNOWN 0
/* U+2581 */
#define MARK "\xE2\x96\x81"
#define MARK_SIZE 3

/* An edge of the tree of pieces, found by the node that it leaves and its byte. */
typedef struct {
    uint32_t key_node, node, piece;
    uint8_t byte, is_used;
} Edge;

typedef struct {
    PyObject_HEAD
    Edge *edges;
    size_t num_slots, num_nodes;
    double *scores;
    uint16_t characters[1 << 16];
    uint32_t unknown;
    int joins_spaces, drops_empty;
} Unigram;

static Edge *find_edge(const Unigram *self, uint32_t node, uint8_t byte)
{
    uint64_t hash = ((uint64_t)node << 8 | byte) * 0x9E3779B97F4A7C15u;
    size_t at = (size_t)(hash >> 32) & (self->num_slots - 1);
    for (; self->edges[at].is_used; at = (at + 1) & (self->num_slots - 1))
        if (self->edges[at].key_node == node && self->edges[at].byte == byte)
            break;
    return self->edges + at;
}

static int add_piece(Unigram *self, const uint8_t *text, int64_t size, uint32_t piece)
{
    uint32_t node = 0;
    Edge *edge = NULL;
    for (int64_t i = 0; i < size; i++) {
        edge = find_edge(self, node, text[i]);
        if (!edge->is_used)
            *edge = (Edge){node, (uint32_t)++self->num_nodes, NO_PIECE, text[i], 1};
        node = edge->node;
    }
    if (!edge || edge->piece != NO_PIECE)
        return 0;
    edge->piece = piece;
    return 1;
}

static size_t put_character(unsigned code, uint8_t *to)
{
    if (code < 0x80) {
        to[0] = (uint8_t)code;
        return 1;
    }
    if (code < 0x800) {
        to[0] = (uint8_t)(0xC0 | code >> 6);
        to[1] = (uint8_t)(0x80 | (code & 0x3F));
        return 2;
    }
    to[0] = (uint8_t)(0xE0 | code >> 12);
    to[1] = (uint8_t)(0x80 | (code >> 6 & 0x3F));
    to[2] = (uint8_t)(0x80 | (code & 0x3F));
    return 3;
}

/* Write a word as the model sees it, in UTF-8 with a mark in front; -1 if that is left to the library. */
static int64_t normalize(const Unigram *self, PyObject *word, uint8_t *to)
{
    Py_ssize_t length = PyUnicode_GET_LENGTH(word), start = 0;
    int kind = PyUnicode_KIND(word);
    const void *data = PyUnicode_DATA(word);
    if (length > LONGEST)
        return -1;
    for (; start < length; start++) {
        Py_UCS4 code = PyUnicode_READ(kind, data, start);
        if (code > 0xFFFF || self->characters[code] != SPACE)
            break;
    }
    if ((start > 1 && !self->joins_spaces) || (start == length && !self->drops_empty))
        return -1;
    if (start == length)
        return 0;
    memcpy(to, MARK, MARK_SIZE);
    size_t size = MARK_SIZE;
    for (Py_ssize_t i = start; i < length; i++) {
        Py_UCS4 code = PyUnicode_READ(kind, data, i);
        unsigned known = code > 0xFFFF ? UNKNOWN : self->characters[code];
        if (known <= SPACE)
            return -1;
        size += put_character(known, to + size);
    }
    return (int64_t)size;
}

/* Find the best path; -1 if the word is left to the library. Ids are written from the end of `ids`. */
static int64_t find_path(const Unigram *self, const uint8_t *text, size_t size, uint32_t *ids)
{
    double best[3 * LONGEST + MARK_SIZE + 1];
    uint32_t pieces[3 * LONGEST + MARK_SIZE + 1];
    uint16_t starts[3 * LONGEST + MARK_SIZE + 1];
    uint8_t is_tied[3 * LONGEST + MARK_SIZE + 1] = {0};
    for (size_t i = 0; i <= size; i++)
        starts[i] = UINT16_MAX;
    best[0] = 0;
    for (size_t at = 0; at < size;) {
        size_t width = text[at] < 0x80 ? 1 : text[at] < 0xE0 ? 2 : 3;
        int is_piece = 0;
        uint32_t node = 0;
        for (size_t i = at; i < size; i++) {
            const Edge *edge = find_edge(self, node, text[i]);
            if (!edge->is_used)
                break;
            node = edge->node;
            if (edge->piece == NO_PIECE)
                continue;
            size_t end = i + 1;
            double score = self->scores[edge->piece] + best[at];
            is_piece |= end == at + width;
            if (starts[end] != UINT16_MAX && score <= best[end] + TIE) {
                is_tied[end] |= score >= best[end] - TIE;
                best[end] = score > best[end] ? score : best[end];
            } else {
                best[end] = score;
                is_tied[end] = 0;
                starts[end] = (uint16_t)at;
                pieces[end] = edge->piece;
            }
        }
        if (!is_piece)
            return -1;
        at += width;
    }
    int64_t count = 0;
    for (size_t at = size; at; at = starts[at]) {
        if (is_tied[at] || pieces[at] == self->unknown)
            return -1;
        ids[size - (size_t)++count] = pieces[at];
    }
    return count;
}

PyDoc_STRVAR(encode_doc, "encode(words)\n--\n\n"
                         "Return the ids of all words, and how many each has; -1 for one that is left to the library.");

static PyObject *unigram_encode(PyObject *object, PyObject *words)
{
    const Unigram *self = (const Unigram *)object;
    if (!PyList_CheckExact(words)) {
        PyErr_SetString(PyExc_TypeError, "encode takes a list of strings");
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(words);
    size_t used = 0, room = (size_t)count * 8 + 1024;
    uint32_t *ids = PyMem_RawMalloc(room * sizeof *ids);
    PyObject *result = NULL, *counts = PyByteArray_FromStringAndSize(NULL, count * 8);
    if (!ids || !counts) {
        PyErr_NoMemory();
        goto end;
    }
    int64_t *to = (int64_t *)PyByteArray_AS_STRING(counts);
    for (Py_ssize_t i = 0; i < count; i++) {
        uint8_t text[3 * LONGEST + MARK_SIZE];
        uint32_t found[3 * LONGEST + MARK_SIZE];
        PyObject *word = PyList_GET_ITEM(words, i);
        if (!PyUnicode_Check(word)) {
            PyErr_SetString(PyExc_TypeError, "encode takes a list of strings");
            goto end;
        }
        int64_t size = normalize(self, word, text);
        to[i] = size <= 0 ? size : find_path(self, text, (size_t)size, found);
        if (to[i] <= 0)
            continue;
        if (used + (size_t)to[i] > room) {
            room += room / 2 + 4 * LONGEST;
            uint32_t *more = PyMem_RawRealloc(ids, room * sizeof *ids);
            if (!more) {
                PyErr_NoMemory();
                goto end;
            }
            ids = more;
        }
        memcpy(ids + used, found + size - to[i], (size_t)to[i] * sizeof *ids);
        used += (size_t)to[i];
    }
    PyObject *flat = PyByteArray_FromStringAndSize((const char *)ids, (Py_ssize_t)(used * sizeof *ids));
    if (flat)
        result = Py_BuildValue("(NO)", flat, counts);
end:
    PyMem_RawFree(ids);
    Py_XDECREF(counts);
    return result;
}

static int build(Unigram *self, const Py_buffer *pieces, const Py_buffer *edges, const Py_buffer *scores)
{
    const int64_t *edge = edges->buf;
    int64_t count = scores->len / 8;
    int is_good = edges->len == (count + 1) * 8 && count < UINT32_MAX && edge[0] == 0 && edge[count] == pieces->len;
    for (int64_t i = 0; is_good && i < count; i++)
        is_good = edge[i] < edge[i + 1];
    if (!is_good) {
        PyErr_SetString(PyExc_ValueError, "pieces, edges and scores do not belong together");
        return 0;
    }
    self->num_slots = 4096;
    while (self->num_slots < (size_t)pieces->len * 2)
        self->num_slots *= 2;
    self->edges = PyMem_RawCalloc(self->num_slots, sizeof *self->edges);
    self->scores = PyMem_RawMalloc((size_t)count * 8 + 8);
    if (!self->edges || !self->scores)
        return PyErr_NoMemory() != NULL;
    memcpy(self->scores, scores->buf, (size_t)count * 8);
    for (int64_t i = 0; i < count; i++)
        if (!add_piece(self, (const uint8_t *)pieces->buf + edge[i], edge[i + 1] - edge[i], (uint32_t)i)) {
            PyErr_SetString(PyExc_ValueError, "a piece is there twice");
            return 0;
        }
    return 1;
}

static PyObject *unigram_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    Py_buffer pieces, edges, scores, characters;
    unsigned unknown;
    int joins_spaces, drops_empty;
    if (keywords && PyDict_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "Unigram takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "y*y*y*y*Ipp:Unigram", &pieces, &edges, &scores, &characters, &unknown,
                          &joins_spaces, &drops_empty))
        return NULL;
    Unigram *self = NULL;
    if (characters.len != sizeof self->characters)
        PyErr_SetString(PyExc_ValueError, "the table of characters has 65,536 numbers of two bytes");
    else if ((self = (Unigram *)type->tp_alloc(type, 0))) {
        memcpy(self->characters, characters.buf, sizeof self->characters);
        self->unknown = unknown;
        self->joins_spaces = joins_spaces;
        self->drops_empty = drops_empty;
        if (!build(self, &pieces, &edges, &scores))
            Py_CLEAR(self);
    }
    PyBuffer_Release(&pieces);
    PyBuffer_Release(&edges);
    PyBuffer_Release(&scores);
    PyBuffer_Release(&characters);
    return (PyObject *)self;
}

static void unigram_dealloc(PyObject *object)
{
    Unigram *self = (Unigram *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyMem_RawFree(self->edges);
    PyMem_RawFree(self->scores);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"encode", unigram_encode, METH_O, encode_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_doc, "Unigram(pieces, edges, scores, characters, unknown, joins_spaces, drops_empty)\n--\n\nThe pieces of a model."},
    {Py_tp_new, unigram_new},
    {Py_tp_dealloc, unigram_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec type_spec = {
    .name = "tokenmill.engines.unigram.Unigram",
    .basicsize = sizeof(Unigram),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = type_slots,
};

static int add_type(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &type_spec, NULL);
    int failed = !type || PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, add_type},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "tokenmill.engines.unigram",
    .m_doc = "Unigram models.",
    .m_size = 0,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_unigram(void) { return PyModuleDef_Init(&definition); }
