/* A preloaded library that counts the file operations inside one directory, over all processes of a run, and
   disturbs one of them.

   FAULT_ROOT    the directory; operations elsewhere are left alone
   FAULT_STATE   a file of 64 zero bytes, mapped by every process: the counter and a lock
   FAULT_AT      the number of the operation to disturb, from 1; 0: none
   FAULT_DO      kill-group, kill-one, eio, enospc, eintr or short (a write of half the bytes)
   FAULT_READS   1: opening for reading, reading and listing count too
   FAULT_LOG     a file that gets one line per operation; a write with its bytes in hexadecimal
   FAULT_LOCKS   1: flock fails with ENOLCK, as on a disk without locks
   FAULT_CLOCK   seconds; the clock of the day jumps forth and back by so much, at every other call */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static struct shared { volatile uint64_t count; volatile int lock; } *shared;
static const char *root, *action;
static size_t root_length;
static uint64_t at;
static int reads, log_fd = -1, no_locks;
static double jump;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void start(void) {
    const char *text;
    root = getenv("FAULT_ROOT");
    action = getenv("FAULT_DO") ? getenv("FAULT_DO") : "";
    at = (text = getenv("FAULT_AT")) ? strtoull(text, 0, 10) : 0;
    reads = getenv("FAULT_READS") != 0;
    no_locks = getenv("FAULT_LOCKS") != 0;
    jump = (text = getenv("FAULT_CLOCK")) ? atof(text) : 0;
    if (!root || !(text = getenv("FAULT_STATE"))) { root = 0; return; }
    root_length = strlen(root);
    int fd = syscall(SYS_openat, AT_FDCWD, text, O_RDWR | O_CLOEXEC);
    if (fd < 0) { root = 0; return; }
    shared = mmap(0, 64, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (shared == MAP_FAILED) root = 0;
    /* Far above the descriptors of a program, so that no program uses it by accident. */
    if ((text = getenv("FAULT_LOG"))) {
        fd = syscall(SYS_openat, AT_FDCWD, text, O_WRONLY | O_APPEND | O_CLOEXEC);
        log_fd = fcntl(fd, F_DUPFD_CLOEXEC, 900);
        syscall(SYS_close, fd);
    }
}

static int inside(const char *path) {
    return strncmp(path, root, root_length) == 0 && (path[root_length] == '/' || path[root_length] == 0);
}

static int path_of_fd(int fd, char *out) {
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    out[n < 0 ? 0 : n] = 0;
    return n > 0;
}

static int is_ours_fd(int fd, char *out) { return root && path_of_fd(fd, out) && inside(out); }

static int is_ours(int dir, const char *path, char *out) {
    if (!root || !path) return 0;
    if (path[0] == '/') snprintf(out, PATH_MAX, "%s", path);
    else {
        char base[PATH_MAX];
        if (dir == AT_FDCWD ? !getcwd(base, sizeof base) : !path_of_fd(dir, base)) return 0;
        if (strcmp(path, ".") == 0) snprintf(out, PATH_MAX, "%s", base);
        else if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return 0;
    }
    return inside(out);
}

/* Count an operation. 0: perform it; 1: it fails, errno is set; 2: write half of it. */
enum { META, OPEN, WRITE, READ, SYNC };
static int counted(int kind) {
    if ((!strcmp(action, "short") && kind != WRITE) || (!strcmp(action, "eintr") && kind == META)) return 0;
    uint64_t number = __sync_add_and_fetch(&shared->count, 1);
    if (number != at) return 0;
    if (!strcmp(action, "kill-group")) { kill(0, SIGKILL); pause(); }
    if (!strcmp(action, "kill-one")) { kill(getpid(), SIGKILL); pause(); }
    if (!strcmp(action, "eio")) { errno = EIO; return 1; }
    if (!strcmp(action, "enospc") && kind != READ) { errno = ENOSPC; return 1; }
    if (!strcmp(action, "eintr")) { errno = EINTR; return 1; }
    if (!strcmp(action, "short")) return 2;
    return 0;
}

/* The order of lines is the order of operations: each is performed and logged under one lock. */
static void hold(void) { if (log_fd >= 0) while (__sync_lock_test_and_set(&shared->lock, 1)) usleep(50); }
static void release(void) { if (log_fd >= 0) __sync_lock_release(&shared->lock); }

static void put(const char *op, const char *a, const char *b, uint64_t inode, int64_t offset, const void *data, size_t n) {
    if (log_fd < 0) return;
    int saved = errno;
    size_t room = strlen(a) + strlen(b) + 2 * n + 120;
    char *text = malloc(room);
    int length = snprintf(text, room, "%s\t%s\t%s\t%llu\t%lld\t", op, a, b, (unsigned long long)inode, (long long)offset);
    for (size_t i = 0; i < n; i++) length += sprintf(text + length, "%02x", ((const unsigned char *)data)[i]);
    text[length++] = '\n';
    for (int done = 0; done < length;) done += syscall(SYS_write, log_fd, text + done, length - done);
    free(text);
    errno = saved;
}

static uint64_t inode_of(int fd) { struct stat s; return fstat(fd, &s) ? 0 : s.st_ino; }

static int do_open(int dir, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    int writes = (flags & O_ACCMODE) != O_RDONLY || flags & (O_CREAT | O_TRUNC);
    if (!is_ours(dir, path, full) || (!writes && !reads)) return syscall(SYS_openat, dir, path, flags, mode);
    if (counted(writes ? OPEN : READ) == 1) return -1;
    if (!writes) return syscall(SYS_openat, dir, path, flags, mode);
    hold();
    struct stat s;
    int is_new = fstatat(dir, path, &s, 0) != 0;
    int fd = syscall(SYS_openat, dir, path, flags, mode);
    if (fd >= 0 && is_new) put("create", full, "", inode_of(fd), 0, "", 0);
    else if (fd >= 0 && flags & O_TRUNC) put("truncate", full, "", inode_of(fd), 0, "", 0);
    release();
    return fd;
}

#define MODE va_list list; va_start(list, flags); mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0; va_end(list)
int open(const char *path, int flags, ...) { MODE; return do_open(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE; return do_open(AT_FDCWD, path, flags, mode); }
int openat(int dir, const char *path, int flags, ...) { MODE; return do_open(dir, path, flags, mode); }
int openat64(int dir, const char *path, int flags, ...) { MODE; return do_open(dir, path, flags, mode); }

static ssize_t do_write(int fd, const void *data, size_t n, int64_t offset) {
    char full[PATH_MAX];
    int how = is_ours_fd(fd, full) ? counted(WRITE) : -1;
    if (how == 1) return -1;
    if (how == 2) n = (n + 1) / 2;
    if (how >= 0) hold();
    int64_t place = offset;
    if (how >= 0 && offset < 0) {
        struct stat s;
        place = fcntl(fd, F_GETFL) & O_APPEND && !fstat(fd, &s) ? s.st_size : lseek(fd, 0, SEEK_CUR);
    }
    ssize_t done = offset < 0 ? syscall(SYS_write, fd, data, n) : syscall(SYS_pwrite64, fd, data, n, offset);
    if (how >= 0 && done > 0) put("write", full, "", inode_of(fd), place, data, done);
    if (how >= 0) release();
    return done;
}

ssize_t write(int fd, const void *data, size_t n) { return do_write(fd, data, n, -1); }
ssize_t pwrite(int fd, const void *data, size_t n, off_t offset) { return do_write(fd, data, n, offset); }
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t offset) { return do_write(fd, data, n, offset); }
ssize_t writev(int fd, const struct iovec *parts, int count) {
    char full[PATH_MAX];
    if (!is_ours_fd(fd, full)) return syscall(SYS_writev, fd, parts, count);
    for (int i = 0; i < count; i++) if (parts[i].iov_len) return do_write(fd, parts[i].iov_base, parts[i].iov_len, -1);
    return 0;
}
/* Callers fall back to plain reads and writes, which are counted. */
ssize_t copy_file_range(int in, off64_t *a, int out, off64_t *b, size_t n, unsigned flags) {
    char full[PATH_MAX];
    if (is_ours_fd(out, full)) { errno = ENOSYS; return -1; }
    return syscall(SYS_copy_file_range, in, a, out, b, n, flags);
}
ssize_t sendfile64(int out, int in, off64_t *offset, size_t n) {
    char full[PATH_MAX];
    if (is_ours_fd(out, full)) { errno = EINVAL; return -1; }
    return syscall(SYS_sendfile, out, in, offset, n);
}
ssize_t sendfile(int out, int in, off_t *offset, size_t n) { return sendfile64(out, in, offset, n); }

static ssize_t do_read(int fd, void *data, size_t n, int64_t offset) {
    char full[PATH_MAX];
    if (reads && is_ours_fd(fd, full) && counted(READ) == 1) return -1;
    return offset < 0 ? syscall(SYS_read, fd, data, n) : syscall(SYS_pread64, fd, data, n, offset);
}
ssize_t read(int fd, void *data, size_t n) { return do_read(fd, data, n, -1); }
ssize_t pread(int fd, void *data, size_t n, off_t offset) { return do_read(fd, data, n, offset); }
ssize_t pread64(int fd, void *data, size_t n, off64_t offset) { return do_read(fd, data, n, offset); }
DIR *opendir(const char *path) {
    char full[PATH_MAX];
    if (reads && is_ours(AT_FDCWD, path, full) && counted(META) == 1) return 0;
    return REAL(opendir)(path);
}

static int do_sync(int fd, long call) {
    char full[PATH_MAX];
    if (!is_ours_fd(fd, full)) return syscall(call, fd);
    if (counted(SYNC) == 1) return -1;
    hold();
    int done = syscall(call, fd);
    if (!done) put("sync", full, "", inode_of(fd), 0, "", 0);
    release();
    return done;
}
int fsync(int fd) { return do_sync(fd, SYS_fsync); }
int fdatasync(int fd) { return do_sync(fd, SYS_fdatasync); }

static int do_truncate(int fd, int64_t size) {
    char full[PATH_MAX];
    if (!is_ours_fd(fd, full)) return syscall(SYS_ftruncate, fd, size);
    if (counted(SYNC) == 1) return -1;
    hold();
    int done = syscall(SYS_ftruncate, fd, size);
    if (!done) put("truncate", full, "", inode_of(fd), size, "", 0);
    release();
    return done;
}
int ftruncate(int fd, off_t size) { return do_truncate(fd, size); }
int ftruncate64(int fd, off64_t size) { return do_truncate(fd, size); }

/* One or two paths: an operation on entries of directories. */
static int do_names(const char *op, int dir, const char *path, int other_dir, const char *other, long call, long extra) {
    char full[PATH_MAX], second[PATH_MAX] = "";
    int ours = is_ours(dir, path, full);
    if (other) ours |= is_ours(other_dir, other, second);
    if (ours && counted(META) == 1) return -1;
    if (ours) hold();
    int done = other ? syscall(call, dir, path, other_dir, other, extra) : syscall(call, dir, path, extra);
    if (ours && !done) put(op, full, second, 0, 0, "", 0);
    if (ours) release();
    return done;
}
#define CWD AT_FDCWD
int rename(const char *a, const char *b) { return do_names("rename", CWD, a, CWD, b, SYS_renameat2, 0); }
int renameat(int d, const char *a, int e, const char *b) { return do_names("rename", d, a, e, b, SYS_renameat2, 0); }
int link(const char *a, const char *b) { return do_names("link", CWD, a, CWD, b, SYS_linkat, 0); }
int linkat(int d, const char *a, int e, const char *b, int f) { return do_names("link", d, a, e, b, SYS_linkat, f); }
int unlink(const char *a) { return do_names("unlink", CWD, a, 0, 0, SYS_unlinkat, 0); }
int rmdir(const char *a) { return do_names("rmdir", CWD, a, 0, 0, SYS_unlinkat, AT_REMOVEDIR); }
int unlinkat(int d, const char *a, int f) { return do_names(f & AT_REMOVEDIR ? "rmdir" : "unlink", d, a, 0, 0, SYS_unlinkat, f); }
int mkdir(const char *a, mode_t m) { return do_names("mkdir", CWD, a, 0, 0, SYS_mkdirat, m); }
int mkdirat(int d, const char *a, mode_t m) { return do_names("mkdir", d, a, 0, 0, SYS_mkdirat, m); }

int flock(int fd, int how) {
    if (no_locks) { errno = ENOLCK; return -1; }
    return syscall(SYS_flock, fd, how);
}

static int leap(void) { static volatile unsigned calls; return jump && __sync_add_and_fetch(&calls, 1) & 1; }
int clock_gettime(clockid_t clock, struct timespec *out) {
    int done = syscall(SYS_clock_gettime, clock, out);
    if (clock == CLOCK_REALTIME && leap()) out->tv_sec += (time_t)jump;
    return done;
}
int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    int done = syscall(SYS_gettimeofday, out, zone);
    if (leap()) out->tv_sec += (time_t)jump;
    return done;
}
time_t time(time_t *out) {
    time_t now = syscall(SYS_time, 0) + (leap() ? (time_t)jump : 0);
    if (out) *out = now;
    return now;
}
