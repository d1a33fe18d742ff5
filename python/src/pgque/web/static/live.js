// Fetch the page again every 10 s and replace its live part, while somebody looks at it and uses no field in it.
"use strict";
(function () {
  const period = 10000;
  const part = (page) => page.querySelector("[data-live]");
  const session = (page) => page.documentElement.dataset.session;
  let notice = null;

  function upToDate() {
    if (notice) notice.remove();
    notice = null;
  }

  function outOfDate(old) {
    if (notice) return;
    notice = document.createElement("p");
    notice.className = "flash error";
    notice.setAttribute("role", "alert");
    const time = new Date().toISOString().slice(11, 19);
    notice.textContent = `Not up to date since ${time} UTC: the server does not answer as it should.`;
    old.before(notice);
  }

  async function refresh() {
    const old = part(document);
    if (document.hidden || !old || old.contains(document.activeElement)) return;
    try {
      const headers = { "pgque-live": "1" };
      const answer = await fetch(location.href, { credentials: "same-origin", headers });
      if (answer.redirected) { location.reload(); return; }
      if (!answer.ok) { outOfDate(old); return; }
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      // Another tab has logged in since: its role or database is not the one of the header above.
      if (session(fresh) !== session(document)) { location.reload(); return; }
      upToDate();
      const now = part(fresh);
      for (const one of now ? now.querySelectorAll("details[id]") : []) {
        const before = old.querySelector(`#${CSS.escape(one.id)}`);
        if (before) one.open = before.open;  // a list that somebody unfolded stays so
      }
      if (now && part(document) === old && !old.contains(document.activeElement)) old.replaceWith(now);
    } catch (error) {
      outOfDate(old);
    }
  }
  if (part(document)) setInterval(refresh, period);
})();
