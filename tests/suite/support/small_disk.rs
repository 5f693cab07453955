//! A small disk that a test fills to the last byte.

use std::{
    fs::File,
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
};

use tempfile::TempDir;

const MIB: usize = 1_024 * 1_024;

/// A file system in memory; unmounted at the end.
#[derive(Debug)]
pub(crate) struct SmallDisk(TempDir);

impl SmallDisk {
    /// `None` where this user may not mount one.
    pub(crate) fn mount(mib: usize) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={mib}m"), "none"])
            .arg(folder.path())
            .output();
        mount.is_ok_and(|mount| mount.status.success()).then_some(Self(folder))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    fn ballast(&self) -> PathBuf {
        self.path().join("ballast")
    }

    /// Writes until there is no room.
    pub(crate) fn fill(&self) {
        let mut file = File::options().create(true).append(true).open(self.ballast()).unwrap();
        for piece in [MIB, 4_096, 1] {
            while file.write_all(&vec![0; piece]).is_ok() {}
        }
    }

    pub(crate) fn make_room(&self) {
        std::fs::remove_file(self.ballast()).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // What is still open there goes when it is closed.
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}
