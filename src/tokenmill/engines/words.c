/* A cache of words in front of a tokenizer library. Texts are cut where the library would split them anyway, and each
   piece, a word, is looked up. Words that are not known yet are encoded by the library, once.

   Pairs of classes of characters decide where texts are cut: each ASCII character is a class, and a table gives the
   classes of the rest of the Basic Multilingual Plane. `_cutting.py` computes the tables. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define NUM_CLASSES 256
/* The class of all characters above U+FFFF. */
#define REMOTE 254
/* What is before a text: nothing is cut there. */
#define NOTHING 255
/* A longer word is unlikely to come again, so it is not kept. */
#define LONGEST 64
/* Between two texts is this byte, which UTF-8 never contains, with a quote before and after it. */
#define MARK 0xFF
#define FREE UINT32_MAX

/* Memory that grows. */
typedef struct {
    char *data;
    size_t size, room;
} Heap;

typedef struct {
    uint32_t hash, key, length;
    /* The number of ids and where they start; of one alone, the id itself. */
    uint32_t num_ids, ids;
} Word;

typedef struct {
    PyObject_HEAD
    uint8_t *classes, *cuts;
    Heap words, keys, ids;
    uint32_t *table;
    size_t table_size;
    int is_busy;
} Words;

/* One call: the number of each word, and of how many words the texts up to each end consist. Words that are not kept
   have the numbers -1, -2, ... */
typedef struct {
    Heap numbers, ends, loose, loose_ids;
    PyObject *missing, *loose_texts;
    size_t num_known;
} Call;

static char *reserve(Heap *heap, size_t more)
{
    if (!heap->data || heap->size + more > heap->room) {
        size_t room = heap->size + heap->size / 2 + more + 4096;
        char *data = PyMem_RawRealloc(heap->data, room);
        if (!data)
            return NULL;
        heap->data = data;
        heap->room = room;
    }
    char *place = heap->data + heap->size;
    heap->size += more;
    return place;
}

static void release(Heap *heap)
{
    PyMem_RawFree(heap->data);
    *heap = (Heap){NULL, 0, 0};
}

static uint32_t hash_of(const uint8_t *text, size_t length)
{
    uint64_t hash = length * 0x9E3779B97F4A7C15u;
    for (size_t i = 0; i < length; i += 8) {
        uint64_t part = 0;
        memcpy(&part, text + i, length - i < 8 ? length - i : 8);
        hash = (hash ^ part) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    return (uint32_t)(hash >> 20);
}

static size_t num_words(const Words *self) { return self->words.size / sizeof(Word); }

static Word *word_at(const Words *self, size_t number) { return (Word *)self->words.data + number; }

static void forget(Words *self)
{
    release(&self->words);
    release(&self->keys);
    release(&self->ids);
    PyMem_RawFree(self->table);
    self->table = NULL;
    self->table_size = 0;
}

static int grow_table(Words *self)
{
    size_t size = self->table_size ? self->table_size * 2 : 4096;
    uint32_t *table = PyMem_RawMalloc(size * sizeof *table);
    if (!table)
        return 0;
    memset(table, 0xFF, size * sizeof *table);
    for (size_t i = 0; i < num_words(self); i++) {
        size_t at = word_at(self, i)->hash & (size - 1);
        while (table[at] != FREE)
            at = (at + 1) & (size - 1);
        table[at] = (uint32_t)i;
    }
    PyMem_RawFree(self->table);
    self->table = table;
    self->table_size = size;
    return 1;
}

static int list_text(PyObject *list, const uint8_t *text, size_t length)
{
    PyObject *string = PyUnicode_DecodeUTF8((const char *)text, (Py_ssize_t)length, NULL);
    int is_good = string && !PyList_Append(list, string);
    Py_XDECREF(string);
    return is_good;
}

static int look_up(Words *self, Call *call, const uint8_t *text, size_t length)
{
    int32_t *number = (int32_t *)reserve(&call->numbers, sizeof *number);
    if (!number)
        return PyErr_NoMemory() != NULL;
    if (length > LONGEST) {
        *number = (int32_t)(-1 - PyList_GET_SIZE(call->loose_texts));
        return list_text(call->loose_texts, text, length);
    }
    uint32_t hash = hash_of(text, length), found;
    size_t at = hash & (self->table_size - 1);
    for (; (found = self->table[at]) != FREE; at = (at + 1) & (self->table_size - 1)) {
        const Word *word = word_at(self, found);
        if (word->hash == hash && word->length == length && !memcmp(self->keys.data + word->key, text, length)) {
            *number = (int32_t)found;
            return 1;
        }
    }
    *number = (int32_t)num_words(self);
    self->table[at] = (uint32_t)*number;
    size_t key = self->keys.size;
    char *kept = reserve(&self->keys, length);
    Word *word = kept ? (Word *)reserve(&self->words, sizeof *word) : NULL;
    if (!word || key > UINT32_MAX / 2 || *number > INT32_MAX / 2)
        return PyErr_NoMemory() != NULL;
    memcpy(kept, text, length);
    *word = (Word){hash, (uint32_t)key, (uint32_t)length, 0, 0};
    if (num_words(self) * 2 > self->table_size && !grow_table(self))
        return PyErr_NoMemory() != NULL;
    return list_text(call->missing, text, length);
}

static int end_text(Words *self, Call *call, const uint8_t *text, size_t length)
{
    if (length && !look_up(self, call, text, length))
        return 0;
    size_t *end = (size_t *)reserve(&call->ends, sizeof *end);
    if (!end)
        return PyErr_NoMemory() != NULL;
    *end = call->numbers.size / sizeof(int32_t);
    return 1;
}

/* Find the words of all texts. */
static int cut(Words *self, Call *call, const uint8_t *data, size_t size)
{
    size_t start = 0, i = 0;
    unsigned before = NOTHING;
    while (i < size) {
        unsigned byte = data[i], here = byte;
        size_t width = 1;
        if (byte == MARK) {
            if (i == start || data[i - 1] != '"' || i + 1 == size || data[i + 1] != '"') {
                PyErr_SetString(PyExc_ValueError, "the texts are not packed");
                return 0;
            }
            if (!end_text(self, call, data + start, i - 1 - start))
                return 0;
            i += 2;
            start = i;
            before = NOTHING;
            continue;
        }
        if (byte >= 0x80) {
            width = byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
            if (i + width > size)
                width = size - i;
            here = width == 2   ? self->classes[(byte & 0x1F) << 6 | (data[i + 1] & 0x3F)]
                   : width == 3 ? self->classes[(byte & 0x0F) << 12 | (data[i + 1] & 0x3F) << 6 | (data[i + 2] & 0x3F)]
                                : REMOTE;
        }
        if (self->cuts[before * NUM_CLASSES + here] && i > start) {
            if (!look_up(self, call, data + start, i - start))
                return 0;
            start = i;
        }
        before = here;
        i += width;
    }
    return end_text(self, call, data + start, size - start);
}

/* Let the library encode texts: a function from a list of strings to two buffers, ids and where those of each begin. */
static int encode_texts(PyObject *encode, PyObject *texts, Py_buffer *ids, Py_buffer *edges)
{
    /* The function may do with the list what it likes. */
    Py_ssize_t count = PyList_GET_SIZE(texts);
    PyObject *result = PyObject_CallOneArg(encode, texts), *first, *second;
    if (!result)
        return 0;
    int is_good = PyArg_ParseTuple(result, "OO:encode", &first, &second) &&
                  !PyObject_GetBuffer(first, ids, PyBUF_C_CONTIGUOUS);
    if (is_good && PyObject_GetBuffer(second, edges, PyBUF_C_CONTIGUOUS)) {
        PyBuffer_Release(ids);
        is_good = 0;
    }
    Py_DECREF(result);
    if (!is_good)
        return 0;
    const int64_t *edge = edges->buf;
    is_good = ids->itemsize == 4 && edges->itemsize == 8 && edges->len == (count + 1) * 8 && edge[0] == 0 &&
              edge[count] == ids->len / 4;
    for (Py_ssize_t i = 0; is_good && i < count; i++)
        is_good = edge[i] <= edge[i + 1];
    if (!is_good) {
        PyErr_SetString(PyExc_ValueError, "the library returned ids that do not belong to the texts");
        PyBuffer_Release(ids);
        PyBuffer_Release(edges);
    }
    return is_good;
}

/* Give words their ids; `heap` keeps those of words with several. */
static int set_ids(Word *words, Heap *heap, const Py_buffer *ids, const Py_buffer *edges, Py_ssize_t first,
                   Py_ssize_t count)
{
    const uint32_t *id = ids->buf;
    const int64_t *edge = edges->buf;
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t start = edge[first + i], num_ids = edge[first + i + 1] - start;
        size_t place = heap->size / sizeof *id;
        words[i].num_ids = (uint32_t)num_ids;
        words[i].ids = num_ids == 1 ? id[start] : (uint32_t)place;
        if (num_ids < 2)
            continue;
        char *to = reserve(heap, (size_t)num_ids * sizeof *id);
        if (!to || num_ids > INT32_MAX || place > UINT32_MAX / 2)
            return PyErr_NoMemory() != NULL;
        memcpy(to, id + start, (size_t)num_ids * sizeof *id);
    }
    return 1;
}

static int encode_missing(Words *self, Call *call, PyObject *encode)
{
    Py_buffer ids, edges;
    Py_ssize_t num_missing = PyList_GET_SIZE(call->missing), num_loose = PyList_GET_SIZE(call->loose_texts);
    if (num_missing + num_loose == 0)
        return 1;
    if (PyList_SetSlice(call->missing, num_missing, num_missing, call->loose_texts) ||
        !encode_texts(encode, call->missing, &ids, &edges))
        return 0;
    Word *loose = (Word *)reserve(&call->loose, (size_t)num_loose * sizeof *loose);
    int is_good = loose && set_ids(word_at(self, call->num_known), &self->ids, &ids, &edges, 0, num_missing) &&
                  set_ids(loose, &call->loose_ids, &ids, &edges, num_missing, num_loose);
    if (!loose)
        PyErr_NoMemory();
    PyBuffer_Release(&ids);
    PyBuffer_Release(&edges);
    return is_good;
}

/* Find a word and its ids. */
static const Word *find(const Words *self, const Call *call, size_t i, const uint32_t **ids)
{
    int32_t number = ((const int32_t *)call->numbers.data)[i];
    const Word *word = number < 0 ? (const Word *)call->loose.data + (-1 - number) : word_at(self, (size_t)number);
    const Heap *heap = number < 0 ? &call->loose_ids : &self->ids;
    *ids = word->num_ids > 1 ? (const uint32_t *)heap->data + word->ids : &word->ids;
    return word;
}

/* Write the ids of all texts, in `itemsize` bytes each, and return two bytearrays. */
static PyObject *collect(const Words *self, const Call *call, int itemsize)
{
    size_t count = call->numbers.size / sizeof(int32_t), num_texts = call->ends.size / sizeof(size_t), num_ids = 0;
    const size_t *ends = (const size_t *)call->ends.data;
    const uint32_t *from;
    for (size_t i = 0; i < count; i++)
        num_ids += find(self, call, i, &from)->num_ids;
    PyObject *ids = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)num_ids * itemsize);
    PyObject *edges = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(num_texts + 1) * 8);
    if (!ids || !edges) {
        Py_XDECREF(ids);
        Py_XDECREF(edges);
        return NULL;
    }
    char *to = PyByteArray_AS_STRING(ids);
    int64_t *edge = (int64_t *)PyByteArray_AS_STRING(edges);
    size_t i = 0, at = 0;
    edge[0] = 0;
    for (size_t text = 0; text < num_texts; text++) {
        for (; i < ends[text]; i++) {
            const Word *word = find(self, call, i, &from);
            for (uint32_t k = 0; k < word->num_ids; k++, at++) {
                if (itemsize == 2)
                    ((uint16_t *)to)[at] = (uint16_t)from[k];
                else
                    ((uint32_t *)to)[at] = from[k];
            }
        }
        edge[text + 1] = (int64_t)at;
    }
    return Py_BuildValue("(NN)", ids, edges);
}

PyDoc_STRVAR(encode_doc, "encode(data, encode, itemsize)\n--\n\n"
                         "Encode packed texts; `encode` gives the ids of words that are not known yet, with the edges "
                         "between them. Return the ids, and the edges between the texts.");

static PyObject *words_encode(PyObject *object, PyObject *args)
{
    Words *self = (Words *)object;
    Py_buffer data;
    PyObject *encode, *result = NULL;
    int itemsize;
    if (self->is_busy) {
        PyErr_SetString(PyExc_RuntimeError, "two threads use one cache of words");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "y*Oi:encode", &data, &encode, &itemsize))
        return NULL;
    self->is_busy = 1;
    Call call = {.missing = PyList_New(0), .loose_texts = PyList_New(0), .num_known = num_words(self)};
    int is_good = call.missing && call.loose_texts && (itemsize == 2 || itemsize == 4);
    if (is_good && !self->table && !grow_table(self))
        is_good = PyErr_NoMemory() != NULL;
    if (is_good && cut(self, &call, data.buf, (size_t)data.len) && encode_missing(self, &call, encode))
        result = collect(self, &call, itemsize);
    if (!result) {
        /* Some words have no ids yet. */
        forget(self);
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "ids have 2 or 4 bytes");
    }
    Heap *heaps[] = {&call.numbers, &call.ends, &call.loose, &call.loose_ids};
    for (size_t i = 0; i < sizeof heaps / sizeof *heaps; i++)
        release(heaps[i]);
    Py_XDECREF(call.missing);
    Py_XDECREF(call.loose_texts);
    PyBuffer_Release(&data);
    self->is_busy = 0;
    return result;
}

PyDoc_STRVAR(clear_doc, "clear()\n--\n\nForget all words and free their memory.");

static PyObject *words_clear(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    if (((Words *)object)->is_busy) {
        PyErr_SetString(PyExc_RuntimeError, "two threads use one cache of words");
        return NULL;
    }
    forget((Words *)object);
    Py_RETURN_NONE;
}

static PyObject *words_num_bytes(PyObject *object, void *Py_UNUSED(closure))
{
    const Words *self = (const Words *)object;
    return PyLong_FromSize_t(self->words.room + self->keys.room + self->ids.room + self->table_size * sizeof(uint32_t));
}

static PyObject *words_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    Py_buffer classes, cuts;
    if (keywords && PyDict_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "Words takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "y*y*:Words", &classes, &cuts))
        return NULL;
    Words *self = NULL;
    if (classes.len != 1 << 16 || cuts.len != NUM_CLASSES * NUM_CLASSES)
        PyErr_SetString(PyExc_ValueError, "each table has 65,536 bytes");
    else if ((self = (Words *)type->tp_alloc(type, 0))) {
        self->classes = PyMem_RawMalloc(1 << 16);
        self->cuts = PyMem_RawMalloc(NUM_CLASSES * NUM_CLASSES);
        if (self->classes && self->cuts) {
            memcpy(self->classes, classes.buf, 1 << 16);
            memcpy(self->cuts, cuts.buf, NUM_CLASSES * NUM_CLASSES);
        } else {
            Py_CLEAR(self);
            PyErr_NoMemory();
        }
    }
    PyBuffer_Release(&classes);
    PyBuffer_Release(&cuts);
    return (PyObject *)self;
}

static void words_dealloc(PyObject *object)
{
    Words *self = (Words *)object;
    PyTypeObject *type = Py_TYPE(object);
    forget(self);
    PyMem_RawFree(self->classes);
    PyMem_RawFree(self->cuts);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"encode", words_encode, METH_VARARGS, encode_doc},
    {"clear", words_clear, METH_NOARGS, clear_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"num_bytes", words_num_bytes, NULL, "The memory that the words take.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_doc, "Words(classes, cuts)\n--\n\nA cache of words, and where texts are cut into words."},
    {Py_tp_new, words_new},
    {Py_tp_dealloc, words_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, NULL},
};

static PyType_Spec type_spec = {
    .name = "tokenmill.engines.words.Words",
    .basicsize = sizeof(Words),
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
    .m_name = "tokenmill.engines.words",
    .m_doc = "A cache of words in front of a tokenizer library.",
    .m_size = 0,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_words(void) { return PyModuleDef_Init(&definition); }
