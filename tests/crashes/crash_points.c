/* A library for LD_PRELOAD under which a process dies at a chosen touch of its durable state, and that notes them all.

   A touch is a call that changes a file or a folder below a root (from C or Python alike: SQLite's calls are seen, too),
   or that sends over TCP, as commits to Redis do. Each has a point before and one after it; a write has one amid it,
   with half of its bytes done. Points are numbered in a file that is mapped: processes count together, and whoever looks
   after a death finds the count. Calls that succeeded are noted, with their bytes, in the order in which they happened:
   `disk.py` reads the notes. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

struct state {
  int64_t passed;  /* points */
  int64_t kill_at; /* 0: none */
  int64_t counts_sockets;
  int64_t spared; /* a process that neither counts nor dies */
};

/* As disk.py reads it; followed by the paths and the bytes. */
struct note {
  uint32_t call, path, other, unused; /* lengths of the two paths */
  uint64_t inode;
  int64_t offset, size; /* of the bytes; of TRUNCATE the new length is `offset` */
};

enum { CREATE = 1, TRUNCATE, WRITE, SYNC, RENAME, LINK, UNLINK, MKDIR, RMDIR, SEND };

static struct state *state;
static char root[PATH_MAX];
static size_t root_length;
static int notes = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define REAL(type, name, ...) \
  static type (*real)(__VA_ARGS__); \
  if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

static int is_next(void) { return state->kill_at && state->passed + 1 == state->kill_at; }

static void point(void) {
  if (is_next()) {
    state->passed++;
    die();
  }
  state->passed++;
}

static void write_note(uint32_t call, const char *path, const char *other, uint64_t inode, int64_t offset,
                       const void *bytes, int64_t size) {
  if (notes < 0) return;
  struct note head = {call, (uint32_t)strlen(path), (uint32_t)strlen(other), 0, inode, offset, size};
  struct iovec parts[] = {{&head, sizeof head},
                          {(void *)path, head.path},
                          {(void *)other, head.other},
                          {(void *)bytes, bytes ? (size_t)size : 0}};
  if (syscall(SYS_writev, notes, parts, 4) < 0) abort();
}

/* For the process that is to be watched from now on; `kill_at` counts from the file's own count. */
void crash_begin(const char *state_file, const char *folder, const char *notes_file) {
  int file = (int)syscall(SYS_openat, AT_FDCWD, state_file, O_RDWR | O_CLOEXEC);
  if (file < 0) abort();
  void *found = mmap(NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (found == MAP_FAILED) abort();
  close(file);
  if (notes >= 0) close(notes);
  notes = *notes_file ? (int)syscall(SYS_openat, AT_FDCWD, notes_file, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
  root_length = strlen(folder);
  memcpy(root, folder, root_length + 1);
  state = found;
}

__attribute__((constructor)) static void begin_by_environment(void) {
  const char *file = getenv("CRASH_STATE"), *folder = getenv("CRASH_ROOT"), *log = getenv("CRASH_NOTES");
  if (file && folder) crash_begin(file, folder, log ? log : "");
}

static int is_watched(void) { return state && state->spared != getpid(); }

static int is_below(const char *path) {
  return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

/* The whole path, if it lies below the root; else NULL. */
static const char *found_at(int folder, const char *path, char *buffer) {
  if (!is_watched() || !path) return NULL;
  if (*path == '/') return is_below(path) ? path : NULL;
  char link[64];
  snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
  ssize_t length = readlink(link, buffer, PATH_MAX - 1);
  if (length < 0 || length + strlen(path) + 2 > PATH_MAX) return NULL;
  buffer[length] = '/';
  strcpy(buffer + length + 1, path);
  return is_below(buffer) ? buffer : NULL;
}

/* Whether the descriptor is a file or a folder below the root. */
static int found_of(int file, char *buffer) {
  if (!is_watched() || file < 0) return 0;
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, buffer, PATH_MAX - 1);
  if (length < 0) return 0;
  buffer[length] = 0;
  struct stat found;
  return is_below(buffer) && !fstat(file, &found) && found.st_nlink; /* else nobody will find it again */
}

static uint64_t inode_of(int file) {
  struct stat found;
  return fstat(file, &found) ? 0 : found.st_ino;
}

static uint64_t inode_at(const char *path) {
  struct stat found;
  return lstat(path, &found) ? 0 : found.st_ino;
}

/* `result` is that of `call`, made between two points; `noted` is done if it succeeded. */
#define BETWEEN_POINTS(type, call, noted) \
  pthread_mutex_lock(&lock); \
  point(); \
  type result = call; \
  int error = errno; \
  if (result >= 0) { noted; } \
  point(); \
  pthread_mutex_unlock(&lock); \
  errno = error; \
  return result

#define OPENING(name) \
  int name(const char *path, int flags, ...) { \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
      va_list more; \
      va_start(more, flags); \
      mode = va_arg(more, mode_t); \
      va_end(more); \
    } \
    REAL(int, name, const char *, int, ...); \
    return opened(AT_FDCWD, path, flags, mode, NULL, real); \
  }

#define OPENING_AT(name) \
  int name(int folder, const char *path, int flags, ...) { \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
      va_list more; \
      va_start(more, flags); \
      mode = va_arg(more, mode_t); \
      va_end(more); \
    } \
    REAL(int, name, int, const char *, int, ...); \
    return opened(folder, path, flags, mode, real, NULL); \
  }

static void note_opened(const char *path, int file, int flags, int is_new) {
  if (is_new) write_note(CREATE, path, "", inode_of(file), 0, NULL, 0);
  else if (flags & O_TRUNC) write_note(TRUNCATE, path, "", inode_of(file), 0, NULL, 0);
}

static int opened(int folder, const char *path, int flags, mode_t mode, int (*at)(int, const char *, int, ...),
                  int (*plain)(const char *, int, ...)) {
  char buffer[PATH_MAX];
  const char *found = flags & (O_CREAT | O_TRUNC) ? found_at(folder, path, buffer) : NULL;
  int is_new = found && !inode_at(found);
  if (!found || (!is_new && !(flags & O_TRUNC))) return at ? at(folder, path, flags, mode) : plain(path, flags, mode);
  BETWEEN_POINTS(int, at ? at(folder, path, flags, mode) : plain(path, flags, mode),
                 note_opened(found, result, flags, is_new));
}

OPENING(open)
OPENING(open64)
OPENING_AT(openat)
OPENING_AT(openat64)

static ssize_t half_of(int file, const void *bytes, size_t size, off64_t offset) {
  return offset < 0 ? syscall(SYS_write, file, bytes, size) : syscall(SYS_pwrite64, file, bytes, size, offset);
}

/* `offset` -1: where the file stands. */
static ssize_t written(int file, const void *bytes, size_t size, off64_t offset, const char *path) {
  pthread_mutex_lock(&lock);
  point();
  off64_t start = offset;
  if (offset < 0) {
    int is_appended = fcntl(file, F_GETFL) & O_APPEND;
    start = (off64_t)lseek(file, 0, is_appended ? SEEK_END : SEEK_CUR);
  }
  if (is_next()) {
    ssize_t done = half_of(file, bytes, size / 2, offset);
    if (done > 0) write_note(WRITE, path, "", inode_of(file), start, bytes, done);
  }
  point();
  ssize_t result = half_of(file, bytes, size, offset);
  int error = errno;
  if (result > 0) write_note(WRITE, path, "", inode_of(file), start, bytes, result);
  point();
  pthread_mutex_unlock(&lock);
  errno = error;
  return result;
}

ssize_t write(int file, const void *bytes, size_t size) {
  char path[PATH_MAX];
  if (!found_of(file, path)) return syscall(SYS_write, file, bytes, size);
  return written(file, bytes, size, -1, path);
}

ssize_t pwrite64(int file, const void *bytes, size_t size, off64_t offset) {
  char path[PATH_MAX];
  if (!found_of(file, path)) return syscall(SYS_pwrite64, file, bytes, size, offset);
  return written(file, bytes, size, offset, path);
}

ssize_t pwrite(int file, const void *bytes, size_t size, off_t offset) { return pwrite64(file, bytes, size, offset); }

/* What is not modelled must not go past the notes: a test compares them with the folder and would tell. */

int ftruncate64(int file, off64_t length) {
  REAL(int, ftruncate64, int, off64_t);
  char path[PATH_MAX];
  if (!found_of(file, path)) return real(file, length);
  BETWEEN_POINTS(int, real(file, length), write_note(TRUNCATE, path, "", inode_of(file), length, NULL, 0));
}

int ftruncate(int file, off_t length) { return ftruncate64(file, length); }

#define SYNCING(name) \
  int name(int file) { \
    REAL(int, name, int); \
    char path[PATH_MAX]; \
    if (!found_of(file, path)) return real(file); \
    BETWEEN_POINTS(int, real(file), write_note(SYNC, path, "", inode_of(file), 0, NULL, 0)); \
  }

SYNCING(fsync)
SYNCING(fdatasync)

static int renamed(int from, const char *old, int to, const char *new, unsigned flags) {
  char first[PATH_MAX], second[PATH_MAX];
  const char *source = found_at(from, old, first), *target = found_at(to, new, second);
  if (!source || !target) return (int)syscall(SYS_renameat2, from, old, to, new, flags);
  BETWEEN_POINTS(int, (int)syscall(SYS_renameat2, from, old, to, new, flags),
                 write_note(RENAME, source, target, inode_at(target), 0, NULL, 0));
}

int rename(const char *old, const char *new) { return renamed(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return renamed(from, old, to, new, 0); }
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
  return renamed(from, old, to, new, flags);
}

int linkat(int from, const char *old, int to, const char *new, int flags) {
  char buffer[PATH_MAX];
  const char *target = found_at(to, new, buffer);
  if (!target) return (int)syscall(SYS_linkat, from, old, to, new, flags);
  BETWEEN_POINTS(int, (int)syscall(SYS_linkat, from, old, to, new, flags),
                 write_note(LINK, target, "", inode_at(target), 0, NULL, 0));
}

int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

int unlinkat(int folder, const char *path, int flags) {
  char buffer[PATH_MAX];
  const char *found = found_at(folder, path, buffer);
  if (!found) return (int)syscall(SYS_unlinkat, folder, path, flags);
  BETWEEN_POINTS(int, (int)syscall(SYS_unlinkat, folder, path, flags),
                 write_note(flags & AT_REMOVEDIR ? RMDIR : UNLINK, found, "", 0, 0, NULL, 0));
}

int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int folder, const char *path, mode_t mode) {
  char buffer[PATH_MAX];
  const char *found = found_at(folder, path, buffer);
  if (!found || inode_at(found)) return (int)syscall(SYS_mkdirat, folder, path, mode);
  BETWEEN_POINTS(int, (int)syscall(SYS_mkdirat, folder, path, mode),
                 write_note(MKDIR, found, "", inode_at(found), 0, NULL, 0));
}

int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

ssize_t send(int socket, const void *bytes, size_t size, int flags) {
  REAL(ssize_t, send, int, const void *, size_t, int);
  struct sockaddr_storage peer;
  socklen_t length = sizeof peer;
  if (!is_watched() || !state->counts_sockets || getpeername(socket, (struct sockaddr *)&peer, &length) ||
      (peer.ss_family != AF_INET && peer.ss_family != AF_INET6))
    return real(socket, bytes, size, flags);
  BETWEEN_POINTS(ssize_t, real(socket, bytes, size, flags), write_note(SEND, "", "", 0, 0, NULL, 0));
}
