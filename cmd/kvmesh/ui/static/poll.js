// poll calls f now and again until the view is left. What goes wrong is shown and
// tried again; a hidden page asks nobody.
export async function poll(signal, ms, f, wrong) {
  while (!signal.aborted) {
    if (!document.hidden) {
      try {
        await f();
        wrong("");
      } catch (error) {
        if (!signal.aborted) wrong(String(error.message ?? error));
      }
    }
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
    });
  }
}
