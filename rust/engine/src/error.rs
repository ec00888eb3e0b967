//! The one error type of the engine.
//!
//! A miss is a value; an error says that something failed. The message is one sentence for the person who operates
//! the host: what is wrong and what to do.

use std::fmt;

/// What kind of failure an [`Error`] is; each kind has one Python exception class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument has the wrong type, value or name.
    InvalidArgument,
    /// No such pool, and it may not be created.
    NotFound,
    /// Files that are not ours to map: version, owner, symlink, truncated, foreign bytes.
    Refused,
    /// A mapped pool holds values that its format forbids.
    Corrupt,
    /// The pool is at its capacity and may not evict.
    Full,
    /// The file system below the pool is full.
    ShmFull,
    /// A bounded wait ran out.
    Busy,
    /// Living processes use the pool.
    InUse,
    /// The object was closed.
    Closed,
    /// Opened before `fork()`, used in the child.
    Forked,
    /// A device or its driver is absent, refuses or has failed.
    Device,
}

/// A failure: a kind for programs and a sentence for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    message: String,
}

/// Result of the engine's operations.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of `kind` with its sentence.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// The kind of failure.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidArgument, message)
    }

    pub(crate) fn refused(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Refused, message)
    }

    pub(crate) fn corrupt(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Corrupt, message)
    }

    pub(crate) fn busy(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Busy, message)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}
