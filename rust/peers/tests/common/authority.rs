//! Authorities for the length of a test, and hosts that they have signed.

use std::path::{Path, PathBuf};
use std::process::Command;

use pegaflow_peers::TlsFiles;

/// A new authority in a directory, and what it has signed for 127.0.0.1.
pub(crate) fn signed(place: &Path) -> TlsFiles {
    std::fs::create_dir_all(place).unwrap();
    std::fs::write(place.join("extensions"), "subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n").unwrap();
    let new = "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    openssl(place, &format!("{new} -x509 -days 2 -subj /CN=authority -keyout ca.key -out ca.pem"));
    openssl(place, &format!("{new} -subj /CN=host -keyout host.key -out host.csr"));
    let by = "-CA ca.pem -CAkey ca.key -CAcreateserial -extfile extensions";
    openssl(place, &format!("x509 -req -days 2 -in host.csr {by} -out host.pem"));
    files(place)
}

/// The files of a host in a directory.
pub(crate) fn files(place: &Path) -> TlsFiles {
    TlsFiles { certificate: place.join("host.pem"), key: place.join("host.key"), ca: place.join("ca.pem") }
}

fn openssl(place: &Path, words: &str) {
    let run = Command::new("openssl").args(words.split(' ')).current_dir(place).output().unwrap();
    assert!(run.status.success(), "openssl {words}: {}", String::from_utf8_lossy(&run.stderr));
}

/// Put what is in these files in the place of those, each at once.
pub(crate) fn replace(old: &TlsFiles, new: &TlsFiles) {
    for (old, new) in [(&old.certificate, &new.certificate), (&old.key, &new.key), (&old.ca, &new.ca)] {
        put(old, &std::fs::read(new).unwrap());
    }
}

/// Replace one file.
pub(crate) fn put(path: &Path, bytes: &[u8]) {
    let beside: PathBuf = path.with_extension("new");
    std::fs::write(&beside, bytes).unwrap();
    std::fs::rename(beside, path).unwrap();
}
