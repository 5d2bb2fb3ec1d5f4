/* One pass from lines to packed texts: the text of each line is validated and written to one buffer of UTF-8, that of
   JSON lines without its escapes. No Python object is made for a line.

   The scanner of JSON is strict, and it never guesses: a line that it does not understand is returned as odd, and the reader
   decodes it with msgspec, which also explains what is wrong. Odd are lines that are not JSON objects with a text, and
   a few that are: wanted fields that are there twice, very long numbers, very deep nesting. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#define STEP 16
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>
#define STEP 16
#else
#define STEP 8
#endif

#define MOST_FIELDS 32
#define MOST_NESTED 64
/* Longer integers are not the same in all languages, and longer exponents may overflow. */
#define MOST_DIGITS 18
#define MOST_EXPONENT_DIGITS 2
/* The loops below write whole steps. */
#define SLACK 64
/* So many bytes are looked at together in runs of blank lines. */
#define RUN 64

typedef const unsigned char *Bytes;

/* A wanted field: names that lead into nested objects. The first field is the text. */
typedef struct {
    Py_ssize_t num_names;
    struct {
        Bytes start;
        Py_ssize_t length;
    } names[MOST_NESTED];
} Field;

/* 64-bit numbers that grow. */
typedef struct {
    int64_t *items;
    Py_ssize_t count, room;
} Numbers;

typedef struct {
    Bytes at, end;
    unsigned char *out;
    const Field *fields;
    Py_ssize_t num_fields;
    /* Of the current line: where the value of each field begins and ends, -1 if it has none. */
    Bytes block;
    int64_t spans[2 * MOST_FIELDS];
    unsigned char *text_end;
    /* The first bytes of all characters outside ASCII so far: bit i stands for the byte 0xC0 + i. */
    uint64_t leads;
} Scan;

static int append(Numbers *numbers, const int64_t *items, Py_ssize_t count)
{
    if (numbers->count + count > numbers->room) {
        Py_ssize_t room = 2 * numbers->room + 256 + count;
        int64_t *grown = PyMem_RawRealloc(numbers->items, (size_t)room * sizeof(int64_t));
        if (grown == NULL)
            return 0;
        numbers->items = grown;
        numbers->room = room;
    }
    memcpy(numbers->items + numbers->count, items, (size_t)count * sizeof(int64_t));
    numbers->count += count;
    return 1;
}

static PyObject *as_bytes(const Numbers *numbers)
{
    return PyBytes_FromStringAndSize((const char *)numbers->items, numbers->count * (Py_ssize_t)sizeof(int64_t));
}

/* Copy a step of bytes, and return how many of them come before the first that is not plain: a quote, a backslash, a
   control character, or a part of a character outside ASCII. */
static inline int copy_plain(Bytes from, unsigned char *to)
{
#if defined(__SSE2__)
    __m128i some = _mm_loadu_si128((const __m128i *)from);
    _mm_storeu_si128((__m128i *)to, some);
    __m128i marks = _mm_or_si128(_mm_cmpeq_epi8(some, _mm_set1_epi8('"')), _mm_cmpeq_epi8(some, _mm_set1_epi8('\\')));
    /* As signed numbers, bytes from 128 on are negative, and so below the space, too. */
    marks = _mm_or_si128(marks, _mm_cmplt_epi8(some, _mm_set1_epi8(' ')));
    int mask = _mm_movemask_epi8(marks);
    return mask ? __builtin_ctz((unsigned)mask) : STEP;
#elif STEP == 16
    uint8x16_t some = vld1q_u8(from);
    vst1q_u8(to, some);
    uint8x16_t marks = vorrq_u8(vceqq_u8(some, vdupq_n_u8('"')), vceqq_u8(some, vdupq_n_u8('\\')));
    marks = vorrq_u8(marks, vcltq_s8(vreinterpretq_s8_u8(some), vdupq_n_s8(' ')));
    uint64_t mask = vget_lane_u64(vreinterpret_u64_u8(vshrn_n_u16(vreinterpretq_u16_u8(marks), 4)), 0);
    return mask ? __builtin_ctzll(mask) / 4 : STEP;
#else
    for (int i = 0; i < STEP; i++) {
        if (from[i] == '"' || from[i] == '\\' || from[i] < ' ' || from[i] >= 0x80)
            return i;
        to[i] = from[i];
    }
    return STEP;
#endif
}

/* The length of the character at `at`, which is outside ASCII; 0 if it is not UTF-8. */
static inline int character_length(Bytes at, Bytes end)
{
    unsigned char first = at[0];
    Py_ssize_t left = end - at;
    if (first >= 0xC2 && first <= 0xDF)
        return left >= 2 && (at[1] & 0xC0) == 0x80 ? 2 : 0;
    if ((first & 0xF0) == 0xE0) {
        if (left < 3 || (at[1] & 0xC0) != 0x80 || (at[2] & 0xC0) != 0x80)
            return 0;
        /* Neither a longer form of a shorter character nor half of a surrogate pair. */
        return (first == 0xE0 && at[1] < 0xA0) || (first == 0xED && at[1] > 0x9F) ? 0 : 3;
    }
    if (first >= 0xF0 && first <= 0xF4) {
        if (left < 4 || (at[1] & 0xC0) != 0x80 || (at[2] & 0xC0) != 0x80 || (at[3] & 0xC0) != 0x80)
            return 0;
        return (first == 0xF0 && at[1] < 0x90) || (first == 0xF4 && at[1] > 0x8F) ? 0 : 4;
    }
    return 0;
}

/* The value of four hexadecimal digits, -1 if they are something else. */
static int32_t read_hex(Bytes at, Bytes end)
{
    if (end - at < 4)
        return -1;
    int32_t value = 0;
    for (int i = 0; i < 4; i++) {
        unsigned char digit = at[i], lower = digit | 0x20;
        if (digit >= '0' && digit <= '9')
            value = value * 16 + digit - '0';
        else if (lower >= 'a' && lower <= 'f')
            value = value * 16 + lower - 'a' + 10;
        else
            return -1;
    }
    return value;
}

/* What one-letter escapes stand for; 0 for letters that are none. */
static const unsigned char ESCAPED[128] = {['n'] = '\n', ['t'] = '\t',  ['r'] = '\r', ['b'] = '\b',
                                           ['f'] = '\f', ['"'] = '"', ['\\'] = '\\', ['/'] = '/'};

/* Decode `\u` escapes: the four digits at `at`, and the second half of a surrogate pair. Return the place after them, or
   NULL if they are no character. */
static Bytes decode_code(Bytes at, Bytes end, unsigned char **to, uint64_t *leads)
{
    unsigned char *out = *to;
    int32_t code = read_hex(at, end);
    if (code < 0 || (code >= 0xDC00 && code <= 0xDFFF))
        return NULL;
    at += 4;
    if (code >= 0xD800 && code <= 0xDBFF) {
        if (end - at < 6 || at[0] != '\\' || at[1] != 'u')
            return NULL;
        int32_t low = read_hex(at + 2, end);
        if (low < 0xDC00 || low > 0xDFFF)
            return NULL;
        at += 6;
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    if (code < 0x80) {
        *out++ = (unsigned char)code;
        *to = out;
        return at;
    }
    if (code < 0x800) {
        *out++ = (unsigned char)(0xC0 | code >> 6);
        *out++ = (unsigned char)(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
        *out++ = (unsigned char)(0xE0 | code >> 12);
        *out++ = (unsigned char)(0x80 | (code >> 6 & 0x3F));
        *out++ = (unsigned char)(0x80 | (code & 0x3F));
    } else {
        *out++ = (unsigned char)(0xF0 | code >> 18);
        *out++ = (unsigned char)(0x80 | (code >> 12 & 0x3F));
        *out++ = (unsigned char)(0x80 | (code >> 6 & 0x3F));
        *out++ = (unsigned char)(0x80 | (code & 0x3F));
    }
    *leads |= (uint64_t)1 << (**to - 0xC0);
    *to = out;
    return at;
}

/* Decode the string that begins with the quote at `at`; return the end of what is written, NULL if it is no string.

   What is written is never longer than what is read, except for the rest of the last step. Places are local variables,
   because the compiler must assume that a byte that is written may be a part of `*scan`. */
static unsigned char *decode_string(Scan *scan, unsigned char *to)
{
    Bytes at = scan->at + 1, end = scan->end;
    for (;;) {
        while (end - at >= STEP) {
            int count = copy_plain(at, to);
            at += count;
            to += count;
            if (count < STEP)
                break;
        }
        if (at == end)
            return NULL;
        unsigned char byte = *at;
        if (byte == '\\') {
            /* Escapes often follow each other: a line end and tabs. */
            do {
                if (end - at < 2)
                    return NULL;
                unsigned char kind = at[1];
                at += 2;
                if (kind < 128 && ESCAPED[kind])
                    *to++ = ESCAPED[kind];
                else if (kind != 'u' || (at = decode_code(at, end, &to, &scan->leads)) == NULL)
                    return NULL;
            } while (at < end && *at == '\\');
        } else if (byte == '"') {
            scan->at = at + 1;
            return to;
        } else if (byte >= 0x80) {
            do {
                int length = character_length(at, end);
                if (!length)
                    return NULL;
                scan->leads |= (uint64_t)1 << (*at - 0xC0);
                for (int i = 0; i < length; i++)
                    to[i] = at[i];
                at += length;
                to += length;
            } while (at < end && *at >= 0x80);
        } else if (byte < ' ') {
            return NULL;
        } else {
            *to++ = byte;
            at++;
        }
    }
}

static void skip_blanks(Scan *scan)
{
    while (scan->at < scan->end && (*scan->at == ' ' || *scan->at == '\t' || *scan->at == '\r'))
        scan->at++;
}

static Py_ssize_t skip_digits(Scan *scan)
{
    Bytes first = scan->at;
    while (scan->at < scan->end && *scan->at >= '0' && *scan->at <= '9')
        scan->at++;
    return scan->at - first;
}

static int skip_number(Scan *scan)
{
    if (*scan->at == '-')
        scan->at++;
    int begins_with_zero = scan->at < scan->end && *scan->at == '0';
    Py_ssize_t count = skip_digits(scan);
    if (!count || count > MOST_DIGITS || (begins_with_zero && count > 1))
        return 0;
    if (scan->at < scan->end && *scan->at == '.') {
        scan->at++;
        if (!skip_digits(scan))
            return 0;
    }
    if (scan->at < scan->end && (*scan->at | 0x20) == 'e') {
        scan->at++;
        if (scan->at < scan->end && (*scan->at == '+' || *scan->at == '-'))
            scan->at++;
        count = skip_digits(scan);
        if (!count || count > MOST_EXPONENT_DIGITS)
            return 0;
    }
    return 1;
}

static int skip_word(Scan *scan, const char *word, Py_ssize_t length)
{
    if (scan->end - scan->at < length || memcmp(scan->at, word, (size_t)length) != 0)
        return 0;
    scan->at += length;
    return 1;
}

static int skip_value(Scan *scan, int depth, uint32_t wanted, int nested);

/* Which of the wanted fields have this name at a depth. */
static uint32_t match(const Scan *scan, uint32_t wanted, int depth, Bytes name, Py_ssize_t length)
{
    uint32_t found = 0;
    for (Py_ssize_t i = 0; i < scan->num_fields; i++) {
        const Field *field = scan->fields + i;
        if ((wanted >> i & 1) && field->num_names > depth && field->names[depth].length == length &&
            memcmp(field->names[depth].start, name, (size_t)length) == 0)
            found |= (uint32_t)1 << i;
    }
    return found;
}

/* Skip an object whose names at `depth` may lead to the wanted fields, and note where these are. */
static int skip_object(Scan *scan, int depth, uint32_t wanted, int nested)
{
    uint32_t seen = 0;
    scan->at++;
    skip_blanks(scan);
    if (scan->at < scan->end && *scan->at == '}') {
        scan->at++;
        return 1;
    }
    for (;;) {
        if (scan->at == scan->end || *scan->at != '"')
            return 0;
        unsigned char *written = decode_string(scan, scan->out);
        if (written == NULL)
            return 0;
        uint32_t found = wanted ? match(scan, wanted, depth, scan->out, written - scan->out) : 0;
        if (found & seen)
            return 0;
        seen |= found;
        skip_blanks(scan);
        if (scan->at == scan->end || *scan->at++ != ':')
            return 0;
        skip_blanks(scan);
        if (!skip_value(scan, depth + 1, found, nested))
            return 0;
        skip_blanks(scan);
        if (scan->at == scan->end)
            return 0;
        unsigned char next = *scan->at++;
        if (next == '}')
            return 1;
        if (next != ',')
            return 0;
        skip_blanks(scan);
    }
}

static int skip_array(Scan *scan, int nested)
{
    scan->at++;
    skip_blanks(scan);
    if (scan->at < scan->end && *scan->at == ']') {
        scan->at++;
        return 1;
    }
    for (;;) {
        if (!skip_value(scan, 0, 0, nested))
            return 0;
        skip_blanks(scan);
        if (scan->at == scan->end)
            return 0;
        unsigned char next = *scan->at++;
        if (next == ']')
            return 1;
        if (next != ',')
            return 0;
        skip_blanks(scan);
    }
}

/* Skip a value to which the first `depth` names of the wanted fields lead; return whether it is valid.

   What is decoded only to be validated is written after the texts, where the next text overwrites it. */
static int skip_value(Scan *scan, int depth, uint32_t wanted, int nested)
{
    if (scan->at == scan->end || nested == MOST_NESTED)
        return 0;
    Bytes start = scan->at;
    int is_text = (wanted & 1) && scan->fields[0].num_names == depth, is_good;
    switch (*start) {
    case '"': {
        unsigned char *written = decode_string(scan, scan->out);
        is_good = written != NULL;
        if (is_good && is_text) {
            scan->text_end = written;
            scan->out = written;
        }
        break;
    }
    case '{': is_good = !is_text && skip_object(scan, depth, wanted, nested + 1); break;
    case '[': is_good = !is_text && skip_array(scan, nested + 1); break;
    case 't': is_good = !is_text && skip_word(scan, "true", 4); break;
    case 'f': is_good = !is_text && skip_word(scan, "false", 5); break;
    case 'n': is_good = !is_text && skip_word(scan, "null", 4); break;
    default: is_good = !is_text && (*start == '-' || (*start >= '0' && *start <= '9')) && skip_number(scan);
    }
    for (Py_ssize_t i = 1; is_good && wanted && i < scan->num_fields; i++)
        if ((wanted >> i & 1) && scan->fields[i].num_names == depth) {
            scan->spans[2 * i] = start - scan->block;
            scan->spans[2 * i + 1] = scan->at - scan->block;
        }
    return is_good;
}

/* Read the names of the wanted fields, a tuple of tuples of bytes; return how many there are, 0 for an error. */
static Py_ssize_t read_fields(PyObject *paths, Field *fields)
{
    Py_ssize_t count = PyTuple_Check(paths) ? PyTuple_Size(paths) : 0;
    if (count < 1 || count > MOST_FIELDS) {
        PyErr_Format(PyExc_ValueError, "expected 1 to %d fields", MOST_FIELDS);
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *path = PyTuple_GetItem(paths, i);
        fields[i].num_names = PyTuple_Check(path) ? PyTuple_Size(path) : 0;
        if (fields[i].num_names < 1 || fields[i].num_names > MOST_NESTED) {
            PyErr_Format(PyExc_ValueError, "expected fields of 1 to %d names", MOST_NESTED);
            return 0;
        }
        for (Py_ssize_t j = 0; j < fields[i].num_names; j++) {
            char *start;
            if (PyBytes_AsStringAndSize(PyTuple_GetItem(path, j), &start, &fields[i].names[j].length) < 0)
                return 0;
            fields[i].names[j].start = (Bytes)start;
        }
    }
    return count;
}

typedef struct {
    Numbers documents, odd;
    int64_t num_lines, longest;
    Py_ssize_t num_bytes;
} Found;

/* The white space of bytes.strip(). */
static int is_blank(unsigned char byte) { return byte == ' ' || (byte >= '\t' && byte <= '\r'); }

/* Pass over a run of blank lines, of which a small archive may hold billions; return the start of the line after them.
   The inner loop has no branches, so that compilers make it a few instructions. */
static Bytes skip_blank_lines(Bytes line, Bytes stop, int is_json, int64_t *num_lines)
{
    for (Bytes at = line; stop - at >= RUN && is_blank(at[0]) && is_blank(at[RUN - 1]); at += RUN) {
        unsigned char filled = 0, ends = 0, vertical = 0;
        for (int i = 0; i < RUN; i++) {
            unsigned char byte = at[i];
            filled |= (byte != ' ') & ((unsigned char)(byte - '\t') > '\r' - '\t');
            vertical |= (unsigned char)(byte - '\v') < 2;
            ends += byte == '\n';
        }
        if (filled || (is_json && vertical))
            break;
        if (!ends)
            continue;
        *num_lines += ends;
        line = at + RUN;
        while (line[-1] != '\n')
            line--;
    }
    return line;
}

/* The most bytes of a text, and of the line that contains it. */
typedef struct {
    long long text, line;
} Limits;

/* Scan all lines of JSON; return 0 if memory runs out. */
static int scan_objects(Scan *scan, unsigned char *texts, Bytes stop, Limits limits, Found *found)
{
    const uint32_t all = scan->num_fields == 32 ? UINT32_MAX : ((uint32_t)1 << scan->num_fields) - 1;
    unsigned char *written = texts;
    for (Bytes line = scan->block; line < stop; found->num_lines++) {
        if (is_blank(*line) && (line = skip_blank_lines(line, stop, 1, &found->num_lines)) == stop)
            break;
        scan->at = line;
        scan->end = stop;
        skip_blanks(scan);
        if (scan->at == stop || *scan->at == '\n') {
            line = scan->at + 1;
            continue;
        }
        for (Py_ssize_t i = 0; i < 2 * scan->num_fields; i++)
            scan->spans[i] = -1;
        scan->text_end = NULL;
        int is_first = found->documents.count == 0;
        if (!is_first)
            memcpy(written, "\"\xff\"", 3);
        unsigned char *text = written + (is_first ? 0 : 3);
        scan->out = text;
        int is_good = *scan->at == '{' && skip_object(scan, 0, all, 0) && scan->text_end != NULL &&
                      scan->text_end - text <= limits.text;
        if (is_good)
            skip_blanks(scan);
        if (is_good && (scan->at == stop || *scan->at == '\n') && scan->at - line <= limits.line) {
            /* The place of the text is not needed, so its two numbers hold the start and the number of the line. */
            scan->spans[0] = line - scan->block;
            scan->spans[1] = found->num_lines;
            if (!append(&found->documents, scan->spans, 2 * scan->num_fields))
                return 0;
            written = scan->text_end;
            found->longest = written - text > found->longest ? written - text : found->longest;
            line = scan->at + 1;
        } else {
            Bytes end = memchr(line, '\n', (size_t)(stop - line));
            end = end ? end : stop;
            int64_t place[3] = {line - scan->block, end - scan->block, found->num_lines};
            if (!append(&found->odd, place, 3))
                return 0;
            line = end + 1;
        }
    }
    found->num_bytes = written - texts;
    return 1;
}

PyDoc_STRVAR(scan_json_doc,
             "scan_json(data, num_bytes, fields, most_bytes, most_line_bytes, /)\n--\n\n"
             "Decode the texts of the lines in the first `num_bytes` of `data`. Longer texts and lines are odd.\n\n"
             "Return the texts, joined by the separator of PackedTexts, the length of the longest, the bits of `leads` of "
             "PackedTexts, the number of lines, a row of numbers for each text, and three numbers for each odd line: its "
             "start, its stop and its number. The row of a text has the start and the number of its line, then the start "
             "and stop of each kept value.");

static PyObject *scan_json(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer data;
    Py_ssize_t num_bytes;
    Limits limits;
    PyObject *paths;
    if (!PyArg_ParseTuple(args, "y*nOLL:scan_json", &data, &num_bytes, &paths, &limits.text, &limits.line))
        return NULL;
    PyObject *result = NULL, *texts = NULL;
    Field *fields = PyMem_RawMalloc(sizeof(Field) * MOST_FIELDS);
    Found found = {{NULL, 0, 0}, {NULL, 0, 0}, 0, 0, 0};
    Scan state = {.fields = fields, .block = data.buf};
    if (fields == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    if (num_bytes < 0 || num_bytes > data.len) {
        PyErr_SetString(PyExc_ValueError, "more bytes than there are");
        goto done;
    }
    if (!(state.num_fields = read_fields(paths, fields)) ||
        !(texts = PyBytes_FromStringAndSize(NULL, num_bytes + SLACK)))
        goto done;
    unsigned char *to = (unsigned char *)PyBytes_AsString(texts);
    int has_memory;
    Py_BEGIN_ALLOW_THREADS;
    has_memory = scan_objects(&state, to, state.block + num_bytes, limits, &found);
    Py_END_ALLOW_THREADS;
    if (!has_memory) {
        PyErr_NoMemory();
        goto done;
    }
    if (_PyBytes_Resize(&texts, found.num_bytes) < 0)
        goto done;
    PyObject *documents = as_bytes(&found.documents), *odd = as_bytes(&found.odd);
    if (documents != NULL && odd != NULL)
        result = Py_BuildValue("OLKLOO", texts, (long long)found.longest, (unsigned long long)state.leads,
                               (long long)found.num_lines, documents, odd);
    Py_XDECREF(documents);
    Py_XDECREF(odd);
done:
    Py_XDECREF(texts);
    PyMem_RawFree(found.documents.items);
    PyMem_RawFree(found.odd.items);
    PyMem_RawFree(fields);
    PyBuffer_Release(&data);
    return result;
}

/* Copy a step of bytes, and return how many of them come before the first outside ASCII. */
static inline int copy_ascii(Bytes from, unsigned char *to)
{
#if defined(__SSE2__)
    __m128i some = _mm_loadu_si128((const __m128i *)from);
    _mm_storeu_si128((__m128i *)to, some);
    int mask = _mm_movemask_epi8(some);
    return mask ? __builtin_ctz((unsigned)mask) : STEP;
#elif STEP == 16
    uint8x16_t some = vld1q_u8(from);
    vst1q_u8(to, some);
    uint8x16_t marks = vcgeq_u8(some, vdupq_n_u8(0x80));
    uint64_t mask = vget_lane_u64(vreinterpret_u64_u8(vshrn_n_u16(vreinterpretq_u16_u8(marks), 4)), 0);
    return mask ? __builtin_ctzll(mask) / 4 : STEP;
#else
    for (int i = 0; i < STEP; i++) {
        if (from[i] >= 0x80)
            return i;
        to[i] = from[i];
    }
    return STEP;
#endif
}

/* Copy text; return the end of what is written, NULL if it is not UTF-8. Steps may read on up to `stop`. */
static unsigned char *copy_text(Bytes at, Bytes end, Bytes stop, unsigned char *to, uint64_t *leads)
{
    while (at < end) {
        int count = STEP;
        while (count == STEP && at < end && stop - at >= STEP) {
            count = copy_ascii(at, to);
            at += count;
            to += count;
        }
        for (; at < end && *at < 0x80 && stop - at < STEP; at++)
            *to++ = *at;
        while (at < end && *at >= 0x80) {
            int length = character_length(at, end);
            if (!length)
                return NULL;
            *leads |= (uint64_t)1 << (*at - 0xC0);
            for (int i = 0; i < length; i++)
                *to++ = *at++;
        }
    }
    /* The last step may have copied what comes after the text. */
    return to - (at - end);
}

/* Scan all lines of text; return 0 if memory runs out, and -1 if a line is too long or not UTF-8. */
static int scan_plain(Scan *scan, unsigned char *texts, Bytes stop, int64_t most_bytes, Found *found)
{
    unsigned char *written = texts;
    for (Bytes line = scan->block; line < stop; found->num_lines++) {
        if (is_blank(*line) && (line = skip_blank_lines(line, stop, 0, &found->num_lines)) == stop)
            break;
        Bytes end = memchr(line, '\n', (size_t)(stop - line)), next;
        end = end ? end : stop;
        next = end + 1;
        Bytes first = line;
        while (first < end && is_blank(*first))
            first++;
        if (first < end) {
            end -= end[-1] == '\r';
            if (end - line > most_bytes)
                return -1;
            if (found->documents.count) {
                memcpy(written, "\"\xff\"", 3);
                written += 3;
            }
            unsigned char *text_end = copy_text(line, end, stop, written, &scan->leads);
            if (text_end == NULL)
                return -1;
            int64_t place[2] = {line - scan->block, found->num_lines};
            if (!append(&found->documents, place, 2))
                return 0;
            found->longest = text_end - written > found->longest ? text_end - written : found->longest;
            written = text_end;
        }
        line = next;
    }
    found->num_bytes = written - texts;
    return 1;
}

PyDoc_STRVAR(scan_text_doc,
             "scan_text(data, num_bytes, most_bytes, /)\n--\n\n"
             "Find the lines of text in the first `num_bytes` of `data`, without blank ones.\n\n"
             "Return the texts, joined by the separator of PackedTexts, the length of the longest, the bits of `leads` of "
             "PackedTexts, the number of lines, and two numbers for each text: the start and the number of its line. "
             "Return None if a text has more than `most_bytes` or is not UTF-8.");

static PyObject *scan_text(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer data;
    Py_ssize_t num_bytes;
    long long most_bytes;
    if (!PyArg_ParseTuple(args, "y*nL:scan_text", &data, &num_bytes, &most_bytes))
        return NULL;
    PyObject *result = NULL, *texts = NULL, *documents = NULL;
    Found found = {{NULL, 0, 0}, {NULL, 0, 0}, 0, 0, 0};
    Scan state = {.block = data.buf};
    if (num_bytes < 0 || num_bytes > data.len) {
        PyErr_SetString(PyExc_ValueError, "more bytes than there are");
        goto done;
    }
    /* A separator is longer than the line end that it replaces. */
    Py_ssize_t room = num_bytes + SLACK;
    for (Py_ssize_t i = 0; i < num_bytes;) {
        unsigned char ends = 0;
        for (Py_ssize_t most = num_bytes - i < 255 ? num_bytes : i + 255; i < most; i++)
            ends += state.block[i] == '\n';
        room += 2 * (Py_ssize_t)ends;
    }
    if (!(texts = PyBytes_FromStringAndSize(NULL, room)))
        goto done;
    unsigned char *to = (unsigned char *)PyBytes_AsString(texts);
    int outcome;
    Py_BEGIN_ALLOW_THREADS;
    outcome = scan_plain(&state, to, state.block + num_bytes, (int64_t)most_bytes, &found);
    Py_END_ALLOW_THREADS;
    if (outcome == 0)
        PyErr_NoMemory();
    else if (outcome < 0)
        result = Py_NewRef(Py_None);
    else if (_PyBytes_Resize(&texts, found.num_bytes) == 0 && (documents = as_bytes(&found.documents)))
        result = Py_BuildValue("OLKLO", texts, (long long)found.longest, (unsigned long long)state.leads,
                               (long long)found.num_lines, documents);
done:
    Py_XDECREF(documents);
    Py_XDECREF(texts);
    PyMem_RawFree(found.documents.items);
    PyBuffer_Release(&data);
    return result;
}

static PyMethodDef functions[] = {
    {"scan_json", scan_json, METH_VARARGS, scan_json_doc},
    {"scan_text", scan_text, METH_VARARGS, scan_text_doc},
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
    .m_name = "tokenmill.readers._line_scanner",
    .m_doc = "Lines to packed texts in one pass.",
    .m_size = 0,
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__line_scanner(void) { return PyModuleDef_Init(&definition); }
