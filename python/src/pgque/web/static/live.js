// Fetch the page again every 10 s and replace its live part, while somebody looks at it and fills in no field in it.
"use strict";
(function () {
  const period = 10000;
  const part = (page) => page.querySelector("[data-live]");
  const session = (page) => page.documentElement.dataset.session;
  let notice = null;

  function quiet() {
    if (notice) notice.remove();
    notice = null;
  }

  function say(old, kind, role, text) {
    if (notice && notice.dataset.kind === kind) return;
    quiet();
    notice = document.createElement("p");
    notice.className = `flash ${kind}`;
    notice.dataset.kind = kind;
    notice.setAttribute("role", role);
    notice.textContent = text;
    old.before(notice);
  }

  function outOfDate(old) {
    const time = new Date().toISOString().slice(11, 19);
    say(old, "error", "alert", `Not up to date since ${time} UTC: the server does not answer as it should.`);
  }

  // What would be lost: a field that somebody is in or has changed, a text that is selected.
  function inUse(old) {
    const active = document.activeElement;
    if (old.contains(active) && active.matches("input, select, textarea")) return true;
    const selection = getSelection();
    if (selection && !selection.isCollapsed && selection.containsNode(old, true)) return true;
    return [...old.querySelectorAll("input, select, textarea")].some((field) => {
      if (field.type === "checkbox" || field.type === "radio") return field.checked !== field.defaultChecked;
      if (field.tagName === "SELECT") {
        const own = [...field.options].some((option) => option.defaultSelected);
        return [...field.options].some((option, n) => option.selected !== (own ? option.defaultSelected : n === 0));
      }
      return field.value !== field.defaultValue;
    });
  }

  function paused(old) {
    if (!inUse(old)) {
      if (notice && notice.dataset.kind === "paused") quiet();
      return false;
    }
    say(old, "paused", "status", "Paused while you type.");
    return true;
  }

  // What an element is called and does: the same after its part was replaced.
  const named = (element) => [
    element.getAttribute("href"), element.getAttribute("aria-label") || element.textContent,
    element.form ? [...new FormData(element.form)].filter(([name]) => name !== "once").join() : "",
  ].join("\n");

  // What somebody has done to the old part stays: the focus, open details, tables that are scrolled.
  function replace(old, now) {
    const active = old.contains(document.activeElement) ? document.activeElement : null;
    const pairs = (selector) => {
      const before = old.querySelectorAll(selector);
      const after = now.querySelectorAll(selector);
      return before.length === after.length ? [...before].map((element, n) => [element, after[n]]) : [];
    };
    for (const after of now.querySelectorAll("details[id]")) {
      const before = old.querySelector(`#${CSS.escape(after.id)}`);
      if (before) after.open = before.open;
    }
    const scrolled = pairs(".scroll").map(([before, after]) => [after, before.scrollLeft]);
    old.replaceWith(now);
    for (const [box, left] of scrolled) box.scrollLeft = left;
    if (!active) return;
    const all = [...now.querySelectorAll(active.tagName)];
    const href = active.getAttribute("href");
    const same = (active.id && document.getElementById(active.id))
      || all.find((element) => named(element) === named(active))
      || (href && all.find((element) => element.getAttribute("href") === href));
    if (same) same.focus({ preventScroll: true });
  }

  async function refresh() {
    const old = part(document);
    if (document.hidden || !old || paused(old)) return;
    try {
      const headers = { "pgque-live": "1" };
      const answer = await fetch(location.href, { credentials: "same-origin", headers });
      if (answer.redirected) { location.assign(answer.url); return; }
      if (!answer.ok) { outOfDate(old); return; }
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      // Another tab has logged in since: its role or database is not the one of the header above.
      if (session(fresh) !== session(document)) { location.reload(); return; }
      const now = part(fresh);
      if (now && part(document) === old && paused(old)) return;
      quiet();
      if (now && part(document) === old) replace(old, now);
    } catch (error) {
      outOfDate(old);
    }
  }

  if (part(document)) {
    setInterval(refresh, period);
    // Say it at once, and not only when the next figures would come.
    for (const event of ["focusin", "focusout", "input", "selectionchange"]) {
      document.addEventListener(event, () => setTimeout(() => part(document) && paused(part(document))));
    }
  }
})();
