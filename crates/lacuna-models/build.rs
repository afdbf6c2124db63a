//! Lists the files of `src/families/` that declare a family of models, so that adding one is adding a
//! file.

use std::env;
use std::fmt::Write;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// What such a file has.
const DECLARATION: &str = "pub(crate) const FAMILY: Family";

fn main() -> io::Result<()> {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo says where it is"));
    let folder = root.join("src/families");
    println!("cargo::rerun-if-changed={}", folder.display());
    let mut modules = String::new();
    let mut families = String::new();
    for path in declaring(&folder)? {
        let module = path.file_stem().expect("a file").to_string_lossy();
        // As a literal, which escapes what a path may have in it.
        let literal = format!("{:?}", path.display().to_string());
        writeln!(modules, "#[path = {literal}]\nmod {module};").expect("text takes text");
        writeln!(families, "    &{module}::FAMILY,").expect("text takes text");
    }
    let text = format!(
        "{modules}\n/// All families that can be run, by name.\n\
         const FAMILIES: &[&Family] = &[\n{families}];\n"
    );
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo says where to write"));
    fs::write(out.join("families.rs"), text)
}

/// The files of `folder` that declare a family, by name.
fn declaring(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        println!("cargo::rerun-if-changed={}", path.display());
        if path.extension().is_some_and(|extension| extension == "rs")
            && fs::read_to_string(&path)?.contains(DECLARATION)
        {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
