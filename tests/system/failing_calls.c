/* Has calls of the C library fail, as on a broken disk or with an NFS server in trouble.
 *
 *     LD_PRELOAD=failing_calls.so FAILING_CALLS="fsync:5:1:/data;rename:18:1:.part" program
 *
 * A fault is CALL:ERRNO:FROM:PATH. Calls of that kind on paths that contain PATH fail from the FROM-th on (from 1);
 * "=N" instead of FROM makes only the N-th fail. Each process counts its own calls.
 */
#define _GNU_SOURCE
#undef _FILE_OFFSET_BITS
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST 16
struct fault { char call[16]; int code; int from; int only; char path[256]; atomic_int count; };
static struct fault faults[MOST];
static int known;
static const char *read_from;

static void read_faults(void) {  /* again whenever the variable is set anew, as in a forked command */
    const char *text = getenv("FAILING_CALLS");
    if (text == read_from) return;
    read_from = text;
    int found = 0;
    while (text && *text && found < MOST) {
        struct fault *one = &faults[found];
        char from[16];
        if (sscanf(text, "%15[^:]:%d:%15[^:]:%255[^;]", one->call, &one->code, from, one->path) != 4) abort();
        atomic_store(&one->count, 0);
        one->only = from[0] == '=';
        one->from = atoi(from + one->only);
        found++;
        text = strchr(text, ';');
        if (text) text++;
    }
    known = found;
}

static int fails(const char *call, const char *path) {
    read_faults();
    for (int i = 0; i < known; i++) {
        struct fault *one = &faults[i];
        if (strcmp(one->call, call) || !path || !strstr(path, one->path)) continue;
        int count = atomic_fetch_add(&one->count, 1) + 1;
        if (one->only ? count == one->from : count >= one->from) { errno = one->code; return 1; }
    }
    return 0;
}

static int path_of(int fd, char *path) {
    char link[64];
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, 4095);
    errno = saved;
    if (size < 0) return 0;
    path[size] = 0;
    return 1;
}

static int fails_fd(const char *call, int fd) {
    char path[4096];
    read_faults();
    int asked = 0;
    for (int i = 0; i < known; i++) asked |= !strcmp(faults[i].call, call);
    return asked && path_of(fd, path) && fails(call, path);
}

static int fails_at(const char *call, int fd, const char *name) {
    char path[8192];
    if (!name || name[0] == '/' || fd == AT_FDCWD || !path_of(fd, path)) return fails(call, name);
    strcat(path, "/");
    strncat(path, name, 4000);
    return fails(call, path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define OPENS(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        if (fails((flags & O_ACCMODE) == O_RDONLY ? "open" : "create", path)) return -1; \
        return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name))(path, flags, mode); }
#define OPENS_AT(name) \
    int name(int at, const char *path, int flags, ...) { \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        if (fails_at((flags & O_ACCMODE) == O_RDONLY ? "open" : "create", at, path)) return -1; \
        return ((int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, #name))(at, path, flags, mode); }
OPENS(open) OPENS(open64) OPENS_AT(openat) OPENS_AT(openat64)

#define ON_FD(call, result, name, declared, passed) \
    result name declared { \
        if (fails_fd(call, fd)) return -1; \
        return ((result (*) declared)dlsym(RTLD_NEXT, #name)) passed; }
ON_FD("read", ssize_t, read, (int fd, void *b, size_t n), (fd, b, n))
ON_FD("read", ssize_t, pread, (int fd, void *b, size_t n, off_t o), (fd, b, n, o))
ON_FD("read", ssize_t, pread64, (int fd, void *b, size_t n, off64_t o), (fd, b, n, o))
ON_FD("read", ssize_t, readv, (int fd, const struct iovec *v, int n), (fd, v, n))
ON_FD("read", ssize_t, preadv, (int fd, const struct iovec *v, int n, off_t o), (fd, v, n, o))
ON_FD("read", ssize_t, preadv64, (int fd, const struct iovec *v, int n, off64_t o), (fd, v, n, o))
ON_FD("read", ssize_t, preadv2, (int fd, const struct iovec *v, int n, off_t o, int f), (fd, v, n, o, f))
ON_FD("read", ssize_t, preadv64v2, (int fd, const struct iovec *v, int n, off64_t o, int f), (fd, v, n, o, f))
ON_FD("write", ssize_t, write, (int fd, const void *b, size_t n), (fd, b, n))
ON_FD("write", ssize_t, pwrite, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o))
ON_FD("write", ssize_t, pwrite64, (int fd, const void *b, size_t n, off64_t o), (fd, b, n, o))
ON_FD("write", ssize_t, writev, (int fd, const struct iovec *v, int n), (fd, v, n))
ON_FD("write", ssize_t, pwritev, (int fd, const struct iovec *v, int n, off_t o), (fd, v, n, o))
ON_FD("write", ssize_t, pwritev64, (int fd, const struct iovec *v, int n, off64_t o), (fd, v, n, o))
ON_FD("write", ssize_t, pwritev2, (int fd, const struct iovec *v, int n, off_t o, int f), (fd, v, n, o, f))
ON_FD("write", ssize_t, pwritev64v2, (int fd, const struct iovec *v, int n, off64_t o, int f), (fd, v, n, o, f))
ON_FD("fsync", int, fsync, (int fd), (fd))
ON_FD("fsync", int, fdatasync, (int fd), (fd))
ON_FD("flock", int, flock, (int fd, int how), (fd, how))
ON_FD("truncate", int, ftruncate, (int fd, off_t n), (fd, n))
ON_FD("truncate", int, ftruncate64, (int fd, off64_t n), (fd, n))
ON_FD("stat", int, fstat, (int fd, struct stat *s), (fd, s))
ON_FD("stat", int, fstat64, (int fd, struct stat64 *s), (fd, s))

int sync_file_range(int fd, off64_t start, off64_t size, unsigned how) {  /* only what waits learns of errors */
    if (how != SYNC_FILE_RANGE_WRITE && fails_fd("fsync", fd)) return -1;
    return REAL(sync_file_range)(fd, start, size, how);
}

int close(int fd) {  /* as on NFS: the descriptor is gone, and the error says that what was written is not there */
    struct stat found;
    int writes = REAL(fcntl)(fd, F_GETFL), regular = writes >= 0 && !REAL(fstat)(fd, &found) && S_ISREG(found.st_mode);
    int failed = regular && (writes & O_ACCMODE) != O_RDONLY && fails_fd("close", fd), code = errno;
    int done = REAL(close)(fd);
    if (failed) { errno = code; return -1; }
    return done;
}

#define ON_PATH(call, name, declared, passed) \
    int name declared { \
        if (fails(call, path)) return -1; \
        return ((int (*) declared)dlsym(RTLD_NEXT, #name)) passed; }
#define ON_PATH_AT(call, name, declared, passed) \
    int name declared { \
        if (fails_at(call, at, path)) return -1; \
        return ((int (*) declared)dlsym(RTLD_NEXT, #name)) passed; }
ON_PATH("stat", stat, (const char *path, struct stat *s), (path, s))
ON_PATH("stat", stat64, (const char *path, struct stat64 *s), (path, s))
ON_PATH("stat", lstat, (const char *path, struct stat *s), (path, s))
ON_PATH("stat", lstat64, (const char *path, struct stat64 *s), (path, s))
ON_PATH_AT("stat", fstatat, (int at, const char *path, struct stat *s, int f), (at, path, s, f))
ON_PATH_AT("stat", fstatat64, (int at, const char *path, struct stat64 *s, int f), (at, path, s, f))
ON_PATH("mkdir", mkdir, (const char *path, mode_t m), (path, m))
ON_PATH_AT("mkdir", mkdirat, (int at, const char *path, mode_t m), (at, path, m))
ON_PATH("unlink", unlink, (const char *path), (path))
ON_PATH_AT("unlink", unlinkat, (int at, const char *path, int f), (at, path, f))
ON_PATH("rename", rename, (const char *path, const char *to), (path, to))
ON_PATH_AT("rename", renameat, (int at, const char *path, int in, const char *to), (at, path, in, to))
ON_PATH_AT("rename", renameat2, (int at, const char *path, int in, const char *to, unsigned f), (at, path, in, to, f))
ON_PATH("link", link, (const char *path, const char *to), (path, to))
ON_PATH_AT("link", linkat, (int at, const char *path, int in, const char *to, int f), (at, path, in, to, f))
