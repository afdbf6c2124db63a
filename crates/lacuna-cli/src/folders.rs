//! Where programs keep what is a user's.

use std::path::PathBuf;

/// The folder that the environment variable `variable` names, or `in_home` in the home folder, and in it `of_program`; `None`
/// where nothing says where home is. Empty variables count as unset, as the XDG base directories have it.
#[must_use]
pub fn user_folder(variable: &str, in_home: &str, of_program: &str) -> Option<PathBuf> {
    let from = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let home = || from("HOME").or_else(|| from("USERPROFILE"));
    let named = from(variable).map(PathBuf::from);
    let folder = named.or_else(|| Some(PathBuf::from(home()?).join(in_home)))?;
    Some(folder.join(of_program))
}
