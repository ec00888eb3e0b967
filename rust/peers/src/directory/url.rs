//! `pegaflow.directory`: which store, in one line of text.

use std::fmt;

use pegaflow_engine::{Error, ErrorKind, Result};
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo};

use crate::limits::DIRECTORY_HOSTS_MAX;

const FORMS: &str = "write redis://[user:password@]host:port/db, rediss://..., \
                     redis+sentinel://host:port,host:port/master/db or redis+cluster://host:port,host:port \
                     (rediss+... for TLS)";

/// How the servers of a store are arranged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Arrangement {
    Single,
    /// Sentinels know who the master of this name is.
    Sentinel(String),
    Cluster,
}

/// A store. Shown without its password.
#[derive(Clone)]
pub struct DirectoryUrl {
    pub(super) arrangement: Arrangement,
    pub(super) hosts: Vec<(String, u16)>,
    tls: bool,
    user: Option<String>,
    password: Option<String>,
    db: i64,
}

impl DirectoryUrl {
    /// Parse a URL.
    pub fn parse(text: &str) -> Result<Self> {
        let refuse =
            |why: String| Error::new(ErrorKind::InvalidArgument, format!("the directory's URL {why}: {FORMS}"));
        let (scheme, rest) = text.split_once("://").ok_or_else(|| refuse("has no scheme".into()))?;
        let (tls, kind) = match scheme.strip_prefix("rediss").or_else(|| scheme.strip_prefix("valkeys")) {
            Some(kind) => (true, Some(kind)),
            None => (false, scheme.strip_prefix("redis").or_else(|| scheme.strip_prefix("valkey"))),
        };
        let (credentials, rest) = match rest.rsplit_once('@') {
            Some((credentials, rest)) => (Some(credentials), rest),
            None => (None, rest),
        };
        let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (arrangement, port, db) = match kind {
            Some("") => (Arrangement::Single, 6379, path),
            Some("+cluster") if path.is_empty() => (Arrangement::Cluster, 6379, ""),
            Some("+cluster") => return Err(refuse("names a db, and a cluster has only one".into())),
            Some("+sentinel") => {
                let (master, db) = path.split_once('/').unwrap_or((path, ""));
                if master.is_empty() {
                    return Err(refuse("does not name the sentinels' master".into()));
                }
                (Arrangement::Sentinel(decoded(master).ok_or_else(|| refuse("is not UTF-8".into()))?), 26379, db)
            }
            _ => return Err(refuse(format!("has the unknown scheme {scheme:?}"))),
        };
        let hosts = hosts.split(',').map(|host| host_and_port(host, port)).collect::<Option<Vec<_>>>();
        let hosts = hosts.ok_or_else(|| refuse("has a host that is none".into()))?;
        if hosts.len() > DIRECTORY_HOSTS_MAX || (arrangement == Arrangement::Single && hosts.len() != 1) {
            return Err(refuse(format!("names {} hosts", hosts.len())));
        }
        let db = if db.is_empty() { Some(0) } else { db.parse::<u16>().ok().map(i64::from) };
        let db = db.ok_or_else(|| refuse("has a db that is no number".into()))?;
        let (user, password) = match credentials.map(|text| text.split_once(':').unwrap_or(("", text))) {
            Some((user, password)) => (decoded(user), Some(decoded(password))),
            None => (None, None),
        };
        if password == Some(None) {
            return Err(refuse("has a password that is not UTF-8".into()));
        }
        Ok(Self {
            arrangement,
            hosts,
            tls,
            user: user.filter(|user| !user.is_empty()),
            password: password.flatten().filter(|password| !password.is_empty()),
            db,
        })
    }

    /// How to connect to one of the store's servers; a sentinel is asked without password and db.
    pub(super) fn connection(&self, host: &str, port: u16, is_sentinel: bool) -> Result<ConnectionInfo> {
        let address = if self.tls {
            ConnectionAddr::TcpTls { host: host.to_owned(), port, insecure: false, tls_params: None }
        } else {
            ConnectionAddr::Tcp(host.to_owned(), port)
        };
        let mut settings = RedisConnectionInfo::default().set_skip_set_lib_name();
        if !is_sentinel {
            settings = settings.set_db(self.db);
            if let Some(user) = &self.user {
                settings = settings.set_username(user);
            }
            if let Some(password) = &self.password {
                settings = settings.set_password(password);
            }
        }
        let info = address.into_connection_info().map_err(|error| {
            Error::new(ErrorKind::InvalidArgument, format!("the directory at {host}:{port} cannot be used: {error}"))
        })?;
        Ok(info.set_redis_settings(settings))
    }

    /// Whether connections are over TLS.
    pub(super) fn is_tls(&self) -> bool {
        self.tls
    }
}

impl fmt::Display for DirectoryUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hosts: Vec<String> = self.hosts.iter().map(|(host, port)| format!("{host}:{port}")).collect();
        let (scheme, hosts) = (if self.tls { "rediss" } else { "redis" }, hosts.join(","));
        match &self.arrangement {
            Arrangement::Single => write!(f, "{scheme}://{hosts}/{}", self.db),
            Arrangement::Sentinel(master) => write!(f, "{scheme}+sentinel://{hosts}/{master}/{}", self.db),
            Arrangement::Cluster => write!(f, "{scheme}+cluster://{hosts}"),
        }
    }
}

impl fmt::Debug for DirectoryUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// `HOST`, `HOST:PORT`, `[V6]` or `[V6]:PORT`.
fn host_and_port(text: &str, default: u16) -> Option<(String, u16)> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']')?;
            (host, if port.is_empty() { None } else { Some(port.strip_prefix(':')?) })
        }
        None => text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
    };
    let port = port.map_or(Some(default), |port| port.parse().ok()).filter(|port| *port != 0)?;
    let possible = !host.is_empty() && host.len() < 256 && host.bytes().all(|byte| byte.is_ascii_graphic());
    possible.then(|| (host.to_owned(), port))
}

/// With its %XX replaced; `None` if that is no text.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let hex = after.get(..2).filter(|_| *first == b'%').and_then(|hex| std::str::from_utf8(hex).ok());
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_understood_and_shown_without_its_password() {
        for (text, shown) in [
            ("redis://h", "redis://h:6379/0"),
            ("redis://:pass@h:1/2", "redis://h:1/2"),
            ("rediss://us%40er:p%3a%2F@h:1", "rediss://h:1/0"),
            ("valkey://h", "redis://h:6379/0"),
            ("redis://[::1]:7/3", "redis://::1:7/3"),
            ("redis+sentinel://a,b:5/main", "redis+sentinel://a:26379,b:5/main/0"),
            ("rediss+sentinel://u:p@a/main/4", "rediss+sentinel://a:26379/main/4"),
            ("redis+cluster://a:1,b:2", "redis+cluster://a:1,b:2"),
        ] {
            let url = DirectoryUrl::parse(text).unwrap();
            assert_eq!(url.to_string(), shown);
            assert_eq!(format!("{url:?}"), shown);
        }
    }

    #[test]
    fn credentials_are_decoded_and_sentinels_are_asked_without_them() {
        let url = DirectoryUrl::parse("redis+sentinel://us%40er:p%3a%2Fx@h:1/m/7").unwrap();
        let settings = url.connection("h", 1, false).unwrap().redis_settings().clone();
        assert_eq!((settings.username(), settings.password(), settings.db()), (Some("us@er"), Some("p:/x"), 7));
        let settings = url.connection("h", 1, true).unwrap().redis_settings().clone();
        assert_eq!((settings.username(), settings.password(), settings.db()), (None, None, 0));
    }

    #[test]
    fn a_wrong_url_is_refused_in_one_sentence_without_its_password() {
        for text in [
            "",
            "h:1",
            "http://secret@h",
            "redis+x://secret@h",
            "redis://secret@",
            "redis://secret@h:0",
            "redis://secret@h:x",
            "redis://secret@h:1/x",
            "redis://secret@a,b",
            "redis+cluster://secret@a/1",
            "redis+sentinel://secret@a",
            "redis+sentinel://secret@a/",
            "redis://:%ff@h",
        ] {
            let message = DirectoryUrl::parse(text).unwrap_err().to_string();
            assert!(message.starts_with("the directory's URL ") && !message.contains("secret"), "{message}");
        }
    }
}
