//! The machine that figures come from: a figure without it means nothing.

use std::fs;
use std::thread::available_parallelism;

use serde::Serialize;

/// How products of floats are computed, and those of attention whose queries fill tiles.
pub(super) fn floats(products: &str, in_tiles: &str) -> String {
    match products == in_tiles {
        true => products.to_owned(),
        false => format!("{products} (attention of many heads to one: {in_tiles})"),
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Machine {
    /// The processor's name, or its architecture where the system does not tell.
    cpu: String,
    /// Cores this process may use.
    cores: usize,
    /// The kernel's release, or the system's name where it does not tell.
    kernel: String,
    /// The processor's page, the smallest that can be mapped.
    page_bytes: usize,
    /// Whether the program was compiled without optimisation, which makes its figures worthless.
    debug_build: bool,
}

impl Machine {
    pub(super) fn this() -> Self {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").ok();
        let kernel = release.map_or_else(
            || std::env::consts::OS.to_owned(),
            |release| format!("Linux {}", release.trim()),
        );
        let processors = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        Self {
            cpu: model_name(&processors)
                .unwrap_or(std::env::consts::ARCH)
                .to_owned(),
            cores: available_parallelism().map_or(1, usize::from),
            kernel,
            page_bytes: rustix::param::page_size(),
            debug_build: cfg!(debug_assertions),
        }
    }

    pub(super) fn line(&self) -> String {
        let warning = if self.debug_build {
            ", DEBUG BUILD"
        } else {
            ""
        };
        format!(
            "{}, {} cores, {}, {} KiB pages{warning}",
            self.cpu,
            self.cores,
            self.kernel,
            self.page_bytes / 1024
        )
    }
}

fn model_name(processors: &str) -> Option<&str> {
    let line = processors
        .lines()
        .find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim())
}

#[cfg(test)]
mod tests {
    use super::model_name;

    #[test]
    fn the_processor_is_named_where_the_system_tells() {
        let text = "processor\t: 0\nmodel name\t: Some CPU @ 2.50GHz\n";
        assert_eq!(model_name(text), Some("Some CPU @ 2.50GHz"));
        assert_eq!(model_name("processor : 0\nBogoMIPS : 50.00\n"), None);
    }
}
